//! Jumbo frames of open flows in XDP: in one buffer, and in several.

use anyhow::{Context, Result};
use traffic_policy_bench::{
    BenchNode, Case, Expected, Flow, Hook, Kind, Loaded, Protocol, Subject,
    flows::{expected, frames, mirror, open},
    frame::{lengthened, packed, unpacked},
    turns,
};
use traffic_policy_bench_ebpf::FRAME_LENGTH;
use traffic_policy_ebpf::outcome::Verdict;

use super::{
    established::{Size, setup},
    over_loads,
};
use crate::{
    Effort,
    report::{Report, Row, Unit},
};

const GROUP: &str = "jumbo";
const MTU: u32 = 9000;
const SIZE: Size = Size::Thousand;
const ETHERNET: usize = 14;

/// A row. Its number is the length of its IP packets in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wanted {
    OneBuffer = 3000,
    Several = 9000,
}

impl Wanted {
    fn name(self) -> &'static str {
        match self {
            Self::OneBuffer => "request, IPv4 TCP, XDP, 3,000 bytes in one buffer",
            Self::Several => "request, IPv4 TCP, XDP, 9,000 bytes in several buffers",
        }
    }
}

pub(super) fn wanted(report: &mut Report) -> Vec<Wanted> {
    let mut all = vec![Wanted::OneBuffer, Wanted::Several];
    all.retain(|row| report.wants(GROUP, row.name()));
    all
}

pub(super) fn measure(
    wanted: &[Wanted],
    fixture: &BenchNode,
    effort: Effort,
    report: &mut Report,
) -> Result<()> {
    if wanted.is_empty() {
        return Ok(());
    }
    fixture.set_mtu(MTU)?;
    report.measure(|| {
        let open = || Table::open(fixture);
        let all = over_loads(effort.loads(), wanted, open, |table, row| table.costs(*row, effort))?;
        let row = |(row, [floor, ours]): (&Wanted, [Vec<f64>; 2])| {
            Row::new(GROUP, row.name(), Unit::Nanoseconds, &ours).beside("floor", &floor)
        };
        Ok(wanted.iter().zip(all).map(row).collect())
    })?;
    fixture.set_mtu(1500)
}

struct Table {
    loaded: Loaded,
    flows: Vec<Flow>,
}

impl Table {
    fn open(fixture: &BenchNode) -> Result<Self> {
        let mut loaded = Loaded::new(fixture, setup(SIZE, false))?;
        let mut device =
            loaded.tables.devices.get(&fixture.ifindex, 0).context("the uplink is not described")?;
        device.mtu = MTU;
        loaded.tables.devices.insert(fixture.ifindex, device, 0)?;
        let flows = open(&mut loaded, false, Protocol::Tcp, SIZE.flows())?;
        mirror(&mut loaded.feeder, &flows)?;
        Ok(Self { loaded, flows })
    }

    fn costs(&mut self, row: Wanted, effort: Effort) -> Result<[Vec<f64>; 2]> {
        let (kind, length) = (Kind::Request, row as u16);
        let frames = frames(&self.flows, kind)?;
        let frames: Vec<_> =
            frames.iter().map(|frame| packed(&lengthened(&unpacked(frame), length))).collect();
        let feeder = &mut self.loaded.feeder;
        feeder.clear();
        feeder.lengthen(usize::from(length) + ETHERNET - FRAME_LENGTH);
        let window = feeder.place(&frames)?;
        let mut frame = lengthened(&expected(&self.flows[0], kind)?, length);
        frame.resize(usize::from(length) + ETHERNET, 0);
        let case = |subject| {
            let expected = Expected { verdict: Verdict::Send, frame: frame.clone() };
            Case { subject, window, outcome: kind.outcome(), expected }
        };
        let cases = [case(Subject::Floor), case(Subject::Ours(Hook::Xdp))];
        let costs = turns::costs(&mut self.loaded, effort.rounds_of(effort.loads()), effort.packets, &cases);
        self.loaded.feeder.lengthen(0);
        costs
    }
}
