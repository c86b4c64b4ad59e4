//! Packets of flows that are open.

use anyhow::Result;
use traffic_policy_ebpf::outcome::Outcome;

use super::{
    flows::{Flow, Kind, Protocol, flows, frames, mirror, open},
    frame::Frame,
    loaded::{Hook, Loaded, Subject},
    stand::Stand,
};
use crate::{
    Effort,
    report::{Goal, Report, Row, Unit},
};

const FEW: u32 = 1_000;
const MANY: u32 = 65_536;

/// What every packet of an established flow may cost.
const XDP: Goal = Goal::TimesAtMost(1.15);
const TC: Goal = Goal::TimesAtMost(2.6);
const IPV6: Goal = Goal::TimesAtMost(1.4);

pub(crate) fn measure(stand: &Stand, effort: Effort, report: &mut Report) -> Result<()> {
    let mut loaded = Loaded::new(stand)?;
    let mut tcp = flows(false, Protocol::Tcp, FEW);
    open(&mut loaded, Hook::Xdp, &mut tcp)?;
    mirror(&mut loaded, &tcp)?;
    let floor = [frames(&tcp, Kind::Request)?, frames(&tcp, Kind::Reply)?];
    let rows = [
        ("IPv4 TCP, 1k flows", false, Protocol::Tcp, Hook::Xdp, XDP),
        ("IPv4 UDP, 1k flows", false, Protocol::Udp, Hook::Xdp, XDP),
        ("IPv6 TCP, 1k flows", true, Protocol::Tcp, Hook::Xdp, IPV6),
        ("IPv6 UDP, 1k flows", true, Protocol::Udp, Hook::Xdp, IPV6),
        ("IPv4 TCP, 1k flows, TC", false, Protocol::Tcp, Hook::Tc, TC),
    ];
    for (name, ipv6, protocol, hook, goal) in rows {
        let mut others = flows(ipv6, protocol, FEW);
        if ipv6 || protocol == Protocol::Udp {
            open(&mut loaded, Hook::Xdp, &mut others)?;
        } else {
            others.clone_from(&tcp);
        }
        for ((way, kind, outcome), floor) in WAYS.into_iter().zip(&floor) {
            let frames = frames(&others, kind)?;
            let [floor, ours] = costs(
                &mut loaded,
                effort,
                &[Case::floor(floor), Case { subject: Subject::Ours(hook), frames: &frames, outcome }],
            )?;
            let row = Row::new("established", &format!("{way}, {name}"), Unit::Nanoseconds, &ours);
            report.add(row.beside("floor", &floor).goal(goal));
        }
    }
    if effort.full { large(stand, effort, report) } else { Ok(()) }
}

const WAYS: [(&str, Kind, Outcome); 2] =
    [("request", Kind::Request, Outcome::Forwarded), ("reply", Kind::Reply, Outcome::Replied)];

/// A table in which memory decides.
fn large(stand: &Stand, effort: Effort, report: &mut Report) -> Result<()> {
    let mut loaded = Loaded::new(stand)?;
    let mut tcp = flows(false, Protocol::Tcp, MANY);
    open(&mut loaded, Hook::Xdp, &mut tcp)?;
    mirror(&mut loaded, &tcp)?;
    let mut shuffled = tcp.clone();
    shuffle(&mut shuffled);
    for (order, flows) in [("in order of creation", &tcp), ("in random order", &shuffled)] {
        for (way, kind, outcome) in WAYS {
            let frames = frames(flows, kind)?;
            let ours = Case { subject: Subject::Ours(Hook::Xdp), frames: &frames, outcome };
            let [floor, ours] = costs(&mut loaded, effort, &[Case::floor(&frames), ours])?;
            let name = format!("{way}, IPv4 TCP, 64k flows, {order}");
            let row = Row::new("established", &name, Unit::Nanoseconds, &ours);
            report.add(row.beside("floor", &floor).goal(XDP));
        }
    }
    Ok(())
}

/// Fisher–Yates with a fixed seed: every run of the bench sees the same order.
fn shuffle(flows: &mut [Flow]) {
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    for last in (1..flows.len()).rev() {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        flows.swap(last, (random % (last as u64 + 1)) as usize);
    }
}

/// A program and the packets that it gets.
pub(crate) struct Case<'a> {
    pub(crate) subject: Subject,
    pub(crate) frames: &'a [Frame],
    /// What must become of each packet, of the packet path's own.
    pub(crate) outcome: Outcome,
}

impl<'a> Case<'a> {
    fn floor(frames: &'a [Frame]) -> Self {
        Self { subject: Subject::Floor, frames, outcome: Outcome::Forwarded }
    }
}

/// Nanoseconds per packet of each program; they take turns.
pub(crate) fn costs<const N: usize>(
    loaded: &mut Loaded,
    effort: Effort,
    cases: &[Case<'_>; N],
) -> Result<[Vec<f64>; N]> {
    let mut runs = [const { Vec::new() }; N];
    for _ in 0..effort.rounds {
        for (runs, Case { subject, frames, outcome }) in runs.iter_mut().zip(cases) {
            let packets = effort.packets.next_multiple_of(frames.len() as u32);
            loaded.set_frames(frames)?;
            let empty = loaded.run(Subject::Empty(subject.hook()), packets)?;
            let took = match subject {
                Subject::Ours(hook) => loaded.run_to(*hook, packets, *outcome)?,
                other => loaded.run(*other, packets)?,
            };
            runs.push(took.on_average - empty.on_average);
        }
    }
    Ok(runs)
}

/// The lower quartile: whatever else the machine does can only add to a run.
pub(crate) fn low(mut runs: Vec<f64>) -> f64 {
    runs.sort_by(f64::total_cmp);
    runs[runs.len() / 4]
}
