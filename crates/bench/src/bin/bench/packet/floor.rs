//! The floors by themselves.

use anyhow::Result;
use traffic_policy_bench::{
    BenchNode, Case, Expected, Kind, Loaded, Subject,
    flows::{frames, mirror, supposed},
    frame::unpacked,
    turns,
};
use traffic_policy_ebpf::outcome::{Outcome, Verdict};

use super::{
    established::{Size, setup, shuffle},
    over_loads,
};
use crate::{
    Effort,
    report::{Report, Row, Unit},
};

const GROUP: &str = "floor";

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Wanted {
    MacSwap,
    Established(Size),
}

impl Wanted {
    fn name(self) -> String {
        match self {
            Self::MacSwap => "MAC swap, XDP".to_owned(),
            Self::Established(size) => {
                format!("one look-up and translation, IPv4 TCP, XDP, {}", size.name(false))
            }
        }
    }
}

pub(super) fn wanted(effort: Effort, report: &mut Report) -> Vec<Wanted> {
    let mut all = vec![Wanted::MacSwap];
    let sizes = Size::ALL.into_iter().filter(|size| effort.full || *size != Size::Million);
    all.extend(sizes.map(Wanted::Established));
    all.retain(|row| report.wants(GROUP, &row.name()));
    all
}

pub(super) fn measure(
    wanted: &[Wanted],
    fixture: &BenchNode,
    effort: Effort,
    report: &mut Report,
) -> Result<()> {
    for row in wanted {
        let (size, subject) = match row {
            Wanted::MacSwap => (Size::Thousand, Subject::MacSwap),
            Wanted::Established(size) => (*size, Subject::Floor),
        };
        let loads = if size <= Size::Thousand { effort.loads() } else { 1 };
        let seed = report.seed;
        report.measure(|| {
            let load = || load(fixture, *row, size, subject, seed);
            let all = over_loads(loads, &[()], load, |(loaded, case), ()| {
                let cases = std::slice::from_ref(case).try_into()?;
                turns::costs(loaded, effort.rounds_of(loads), effort.packets, cases)
            })?;
            Ok(all.iter().map(|[runs]| Row::new(GROUP, &row.name(), Unit::Nanoseconds, runs)).collect())
        })?;
    }
    Ok(())
}

fn load(fixture: &BenchNode, row: Wanted, size: Size, subject: Subject, seed: u64) -> Result<(Loaded, Case)> {
    let mut loaded = Loaded::new(fixture, setup(size, false))?;
    let mut flows = supposed(size.flows(), loaded.setup.endpoints);
    mirror(&mut loaded.feeder, &flows)?;
    if size == Size::ManyShuffled || size == Size::Million {
        shuffle(&mut flows, seed);
    }
    let packets = frames(&flows, Kind::Request)?;
    let window = loaded.feeder.place(&packets)?;
    let case = match row {
        Wanted::Established(_) => Case::open(subject, window, &flows[0], Kind::Request)?,
        Wanted::MacSwap => {
            let mut frame = unpacked(&packets[0]);
            frame[..12].rotate_left(6);
            let expected = Expected { verdict: Verdict::Send, frame };
            Case { subject, window, outcome: Outcome::Forwarded, expected }
        }
    };
    Ok((loaded, case))
}
