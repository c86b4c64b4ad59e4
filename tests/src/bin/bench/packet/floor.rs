//! The floors by themselves.

use anyhow::Result;
use traffic_policy_ebpf::outcome::{Outcome, Verdict};
use traffic_policy_tests::bench::{
    Case, Expected, Kind, Loaded, Stand, Subject,
    flows::{frames, mirror, supposed},
    frame::unpacked,
    turns,
};

use super::established::{Size, setup, shuffle};
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

pub(super) fn measure(wanted: &[Wanted], stand: &Stand, effort: Effort, report: &mut Report) -> Result<()> {
    for row in wanted {
        let (size, subject) = match row {
            Wanted::MacSwap => (Size::Thousand, Subject::MacSwap),
            Wanted::Established(size) => (*size, Subject::Floor),
        };
        let mut loaded = Loaded::new(stand, setup(size, false))?;
        let mut flows = supposed(size.flows(), loaded.setup.endpoints);
        mirror(&mut loaded.feeder, &flows)?;
        if size == Size::ManyShuffled || size == Size::Million {
            shuffle(&mut flows, report.seed);
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
        report.measure(|| {
            let [runs] = turns::costs(
                &mut loaded,
                effort.rounds,
                effort.packets,
                std::slice::from_ref(&case).try_into()?,
            )?;
            Ok(vec![Row::new(GROUP, &row.name(), Unit::Nanoseconds, &runs)])
        })?;
    }
    Ok(())
}
