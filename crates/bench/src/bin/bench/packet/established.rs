//! Packets of flows that are open.

use std::{collections::BTreeMap, fs};

use anyhow::Result;
use traffic_policy_bench::{
    BenchNode, Case, Feeder, Flow, Hook, Kind, Loaded, Protocol, Room, Setup, Subject, Window,
    flows::{frames, mirror, open, supposed},
    turns,
};
use traffic_policy_bench_ebpf::FRAME_LENGTH;
use traffic_policy_dataplane::MapSizes;

use super::{family, over_loads};
use crate::{
    Effort,
    report::{Goal, Report, Row, Unit},
};

const GROUP: &str = "established";

/// Largest cost of a packet of an established flow, relative to the floor's cost in XDP over IPv4.
const XDP: Goal = Goal::TimesAtMost(1.15);
const TC: Goal = Goal::TimesAtMost(2.6);
const IPV6: Goal = Goal::TimesAtMost(1.4);

/// Number of flows, and the order of their packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Size {
    One,
    Thousand,
    /// Enough flows that memory, not the program, decides; in the order in which they were made,
    /// which prefetching helps.
    Many,
    ManyShuffled,
    /// A million flows, in random order.
    Million,
}

impl Size {
    pub(super) const ALL: [Self; 5] =
        [Self::One, Self::Thousand, Self::Many, Self::ManyShuffled, Self::Million];

    pub(super) fn flows(self) -> u32 {
        match self {
            Self::One => 1,
            Self::Thousand => 1_000,
            Self::Many | Self::ManyShuffled => 65_536,
            Self::Million => 1_000_000,
        }
    }

    /// Returns the name of the size; the default table of IPv6 has no room for both entries of 64k
    /// flows.
    pub(super) fn name(self, ipv6: bool) -> &'static str {
        match (self, ipv6) {
            (Self::One, _) => "1 flow",
            (Self::Thousand, _) => "1k flows",
            (Self::Many, false) => "64k flows in order of creation",
            (Self::Many, true) => "64k flows in order of creation (table of 256k)",
            (Self::ManyShuffled, false) => "64k flows in random order",
            (Self::ManyShuffled, true) => "64k flows in random order (table of 256k)",
            (Self::Million, _) => "1M flows in random order (table of 4M)",
        }
    }

    fn shuffled(self) -> bool {
        matches!(self, Self::ManyShuffled | Self::Million)
    }
}

/// Returns maps sized for these flows: room for twice their entries, like the default for 64k
/// flows.
pub(super) fn setup(size: Size, ipv6: bool) -> Setup {
    let default = MapSizes::default();
    let entries = match size {
        Size::Million => 4_194_304,
        _ => default.flows4,
    };
    let sizes = match (size, ipv6) {
        (Size::Million, false) => MapSizes { flows4: entries, ..default },
        (Size::Million | Size::Many | Size::ManyShuffled, true) => MapSizes { flows6: entries, ..default },
        _ => default,
    };
    // The room holds the frames of the row and, where they differ, of the floor.
    let room = Room { frames: 2 * size.flows().max(4_000), floor_flows: entries, ..Room::default() };
    Setup { sizes, room, endpoints: if size == Size::Million { 128 } else { 8 }, ..Setup::default() }
}

/// A row of the group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Wanted {
    kind: Kind,
    ipv6: bool,
    protocol: Protocol,
    hook: Hook,
    size: Size,
}

impl Wanted {
    fn name(self) -> String {
        let (direction, family, protocol) = (self.kind.direction(), family(self.ipv6), self.protocol.name());
        format!("{direction}, {family} {protocol}, {}, {}", self.hook.name(), self.size.name(self.ipv6))
    }

    /// Whether the quick run has the row: all kinds with 1k flows, the others for one or two kinds.
    fn quick(self) -> bool {
        let plain = !self.ipv6 && self.protocol == Protocol::Tcp;
        let request = self.kind == Kind::Request;
        match self.size {
            Size::Thousand => true,
            Size::One => plain && request,
            Size::Many => plain && self.hook == Hook::Xdp,
            Size::ManyShuffled => {
                plain && (request || self.hook == Hook::Xdp)
                    || self.ipv6 && self.protocol == Protocol::Tcp && request && self.hook == Hook::Xdp
            }
            Size::Million => plain && request && self.hook == Hook::Xdp,
        }
    }

    /// Returns the goal of the row; goals were set for 1k and 64k flows.
    fn goal(self) -> Option<Goal> {
        let sized = !matches!(self.size, Size::One | Size::Million);
        match (self.hook, self.ipv6) {
            (Hook::Xdp, false) if sized => Some(XDP),
            (Hook::Xdp, true) if sized => Some(IPV6),
            (Hook::Ingress, false) if self.size == Size::Thousand => Some(TC),
            _ => None,
        }
    }
}

pub(super) fn wanted(effort: Effort, report: &mut Report) -> Vec<Wanted> {
    let mut wanted = Vec::new();
    for size in Size::ALL {
        for hook in [Hook::Xdp, Hook::Ingress] {
            for (ipv6, protocol) in
                [(false, Protocol::Tcp), (false, Protocol::Udp), (true, Protocol::Tcp), (true, Protocol::Udp)]
            {
                for kind in [Kind::Request, Kind::Reply] {
                    let row = Wanted { kind, ipv6, protocol, hook, size };
                    if (effort.full || row.quick()) && report.wants(GROUP, &row.name()) {
                        wanted.push(row);
                    }
                }
            }
        }
    }
    wanted
}

pub(super) fn measure(
    wanted: &[Wanted],
    fixture: &BenchNode,
    effort: Effort,
    report: &mut Report,
) -> Result<()> {
    // Rows with the same tables share them.
    let mut tables: BTreeMap<_, Vec<Wanted>> = BTreeMap::new();
    for row in wanted {
        tables.entry((row.size.flows(), row.ipv6, row.protocol)).or_default().push(*row);
    }
    for ((_, ipv6, protocol), rows) in tables {
        let (needed, available) = (memory(&setup(rows[0].size, ipv6)), available());
        if available < needed {
            let megabytes = |bytes: u64| bytes >> 20;
            let (needed, available) = (megabytes(needed), megabytes(available));
            let reason = format!("its tables take {needed} MB, and {available} MB of memory are available");
            rows.iter().for_each(|row| report.skip(GROUP, &row.name(), &reason));
            continue;
        }
        // Where memory decides, filling it is most of the work, and the address of the code matters
        // little.
        let loads = if rows[0].size <= Size::Thousand { effort.loads() } else { 1 };
        let seed = report.seed;
        report.measure(|| {
            let open = || Table::open(fixture, rows[0].size, ipv6, protocol, seed);
            let all = over_loads(loads, &rows, open, |table, row| table.costs(row, effort, loads))?;
            let row = |(row, [floor, ours]): (&Wanted, [Vec<f64>; 2])| {
                let own = Row::new(GROUP, &row.name(), Unit::Nanoseconds, &ours).beside("floor", &floor);
                row.goal().into_iter().fold(own, Row::goal)
            };
            Ok(rows.iter().zip(all).map(row).collect())
        })?;
    }
    Ok(())
}

/// Returns the bytes of the tables of a set-up whose sizes vary, with as much again for everything
/// else.
fn memory(setup: &Setup) -> u64 {
    // Per entry: the kernel's 48 bytes, key and value; and a bucket of 16 bytes.
    let (v4, v6) = (48 + 16 + 64 + 16, 48 + 40 + 88 + 16);
    let Setup { sizes, room, .. } = setup;
    let flows = u64::from(sizes.flows4 + room.floor_flows) * v4 + u64::from(sizes.flows6) * v6;
    2 * (flows + u64::from(room.frames) * FRAME_LENGTH as u64)
}

/// Returns the bytes of memory that may be used; unlimited if the kernel does not report it.
fn available() -> u64 {
    let memory = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = memory.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kilobytes = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    kilobytes.map_or(u64::MAX, |kilobytes| kilobytes << 10)
}

/// Tables with open flows.
struct Table {
    loaded: Loaded,
    ours: Vec<Flow>,
    floor: Vec<Flow>,
    seed: u64,
    shuffled: bool,
}

impl Table {
    fn open(fixture: &BenchNode, size: Size, ipv6: bool, protocol: Protocol, seed: u64) -> Result<Self> {
        let mut loaded = Loaded::new(fixture, setup(size, ipv6))?;
        let ours = open(&mut loaded, ipv6, protocol, size.flows())?;
        let floor = if !ipv6 && protocol == Protocol::Tcp {
            ours.clone()
        } else {
            supposed(size.flows(), loaded.setup.endpoints)
        };
        mirror(&mut loaded.feeder, &floor)?;
        Ok(Self { loaded, ours, floor, seed, shuffled: false })
    }

    /// Measures the costs of the floor and of the packet path. Rows in random order come last.
    fn costs(&mut self, row: &Wanted, effort: Effort, loads: usize) -> Result<[Vec<f64>; 2]> {
        if row.size.shuffled() && !self.shuffled {
            shuffle(&mut self.ours, self.seed);
            shuffle(&mut self.floor, self.seed);
            self.shuffled = true;
        }
        let feeder = &mut self.loaded.feeder;
        feeder.clear();
        let own = place(feeder, &self.ours, row.kind)?;
        let floors = if self.ours == self.floor { own } else { place(feeder, &self.floor, row.kind)? };
        let cases = [
            Case::open(Subject::Floor, floors, &self.floor[0], row.kind)?,
            Case::open(Subject::Ours(row.hook), own, &self.ours[0], row.kind)?,
        ];
        let rounds = effort.rounds_of(loads);
        // Each run covers a million packets anyway.
        let rounds = if row.size == Size::Million { rounds / 2 } else { rounds };
        turns::costs(&mut self.loaded, rounds, effort.packets, &cases)
    }
}

fn place(feeder: &mut Feeder, flows: &[Flow], kind: Kind) -> Result<Window> {
    feeder.place(&frames(flows, kind)?)
}

/// Shuffles by Fisher–Yates with xorshift: the same seed gives the same order.
pub(super) fn shuffle(flows: &mut [Flow], seed: u64) {
    let mut random = seed ^ 0x9e37_79b9_7f4a_7c15;
    for last in (1..flows.len()).rev() {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        flows.swap(last, (random % (last as u64 + 1)) as usize);
    }
}
