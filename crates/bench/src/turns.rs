//! Programs that take turns: the cost of each packet without the feed's, after a check of the
//! output.

use anyhow::{Context, Result, ensure};
use traffic_policy_ebpf::outcome::{Outcome, Verdict};

use super::{
    feeder::{Hook, Window},
    flows::{Flow, Kind, expected},
    frame::{Frame, unpacked},
    loaded::{Loaded, Subject},
};
use traffic_policy_testing::packet::difference;

/// Verdicts XDP_DROP, XDP_PASS, XDP_TX of linux/bpf.h.
const XDP: [u32; 3] = [1, 2, 3];
/// Verdicts TC_ACT_SHOT, TC_ACT_UNSPEC, TC_ACT_REDIRECT of linux/pkt_cls.h.
const TC: [u32; 3] = [2, u32::MAX, 7];

/// Expected verdict on a packet, and the expected frame.
#[derive(Clone, Debug)]
pub struct Expected {
    pub verdict: Verdict,
    pub frame: Vec<u8>,
}

impl Expected {
    /// Expects the packet of an open flow.
    pub fn of(flow: &Flow, kind: Kind) -> Result<Self> {
        Ok(Self { verdict: Verdict::Send, frame: expected(flow, kind)? })
    }

    /// Expects the packet unchanged.
    pub fn unchanged(verdict: Verdict, frame: &Frame) -> Self {
        Self { verdict, frame: unpacked(frame) }
    }
}

/// A program and its packets.
#[derive(Clone, Debug)]
pub struct Case {
    pub subject: Subject,
    pub window: Window,
    /// Expected outcome of each packet, where the packet path is the subject.
    pub outcome: Outcome,
    /// Expected result for the first packet.
    pub expected: Expected,
}

impl Case {
    /// Makes a case with packets of open flows.
    pub fn open(subject: Subject, window: Window, first: &Flow, kind: Kind) -> Result<Self> {
        Ok(Self { subject, window, outcome: kind.outcome(), expected: Expected::of(first, kind)? })
    }

    /// Sends one packet, and compares the output.
    pub fn check(&self, loaded: &mut Loaded) -> Result<()> {
        let took = match self.subject {
            Subject::Ours(hook) => loaded.run_to(hook, self.window, 1, self.outcome)?,
            other => loaded.run(other, self.window, 1)?,
        };
        let verdicts = if self.subject.hook() == Hook::Xdp { XDP } else { TC };
        let expected = match self.expected.verdict {
            Verdict::Drop => verdicts[0],
            Verdict::Pass => verdicts[1],
            Verdict::Send => verdicts[2],
        };
        ensure!(took.verdict == expected, "the kernel is told {}, not {expected}", took.verdict as i32);
        match difference(&self.expected.frame, &took.packet) {
            None => Ok(()),
            Some(difference) => anyhow::bail!("the packet is wrong:\n{difference}"),
        }
    }
}

/// Returns the nanoseconds per packet of each program, from `rounds` rounds in which they take
/// turns on `packets` packets, or on as many more as make a whole number of passes over their
/// window.
pub fn costs<const N: usize>(
    loaded: &mut Loaded,
    rounds: usize,
    packets: u32,
    cases: &[Case; N],
) -> Result<[Vec<f64>; N]> {
    for case in cases {
        case.check(loaded).with_context(|| format!("{:?}", case.subject))?;
    }
    let mut runs = [const { Vec::new() }; N];
    for _ in 0..rounds {
        for (runs, Case { subject, window, outcome, .. }) in runs.iter_mut().zip(cases) {
            let packets = packets.next_multiple_of(window.len);
            let empty = loaded.run(Subject::Empty(subject.hook()), *window, packets)?;
            // The caches then hold what the program itself left there, not the other programs.
            loaded.run(*subject, *window, window.len)?;
            let took = match subject {
                Subject::Ours(hook) => loaded.run_to(*hook, *window, packets, *outcome)?,
                other => loaded.run(*other, *window, packets)?,
            };
            runs.push(took.on_average - empty.on_average);
        }
    }
    Ok(runs)
}

/// Returns the cost of the second case relative to the first: the lower quartile of the pairs of
/// runs, on which disturbed runs have the least influence.
pub fn ratio(loaded: &mut Loaded, rounds: usize, packets: u32, cases: &[Case; 2]) -> Result<f64> {
    let [floor, ours] = costs(loaded, rounds, packets, cases)?;
    Ok(low(ours.iter().zip(&floor).map(|(ours, floor)| ours / floor).collect()))
}

/// Returns the lower quartile: other load on the machine can only add to a run.
pub fn low(mut runs: Vec<f64>) -> f64 {
    runs.sort_by(f64::total_cmp);
    runs[runs.len() / 4]
}
