//! Packets of one CPU while another one has packets, too: the cost of words that both write.
//!
//! Each row is paired with one in which the other CPU has maps of its own: there only the machine
//! itself (caches and memory) is shared.

use anyhow::{Result, ensure};
use traffic_policy_bench::{
    BenchNode, Companion, Content, Hook, Kind, Loaded, Protocol, Restored, Room, Setup, Subject, Window,
    companion::other_cpu,
    flows::{flows, frames, open},
};
use traffic_policy_dataplane::MapSizes;
use traffic_policy_ebpf::outcome::Outcome;

use super::refused::{self, What};
use crate::{
    Effort,
    report::{Goal, Report, Row, Unit},
};

const GROUP: &str = "two CPUs";
/// Number of open flows, and of refused clients.
const OPEN: u32 = 1_000;
/// Number of flows that the flood makes in one run; [`PLACES`] is the number of places in their
/// queue.
const FLOOD: u32 = 65_536;
const PLACES: u32 = 16_384;

/// The work of one CPU.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Work {
    /// Packets of open flows, while the other CPU has first packets of new flows.
    Established(Kind),
    /// Refused packets of one Service, on both CPUs.
    Refused(What, Content),
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Wanted {
    work: Work,
    hook: Hook,
    /// Whether the other CPU has maps of its own.
    apart: bool,
}

impl Wanted {
    fn name(self) -> String {
        let apart = if self.apart { ", in maps of its own" } else { "" };
        match self.work {
            Work::Established(kind) => {
                let (direction, hook) = (kind.direction(), self.hook.name());
                format!("{direction}, IPv4 TCP, {hook}, beside a flood of new flows{apart}")
            }
            Work::Refused(..) => format!("{}, on both{apart}", self.refused().name()),
        }
    }

    fn refused(self) -> refused::Wanted {
        let (what, content) = match self.work {
            Work::Refused(what, content) => (what, content),
            Work::Established(_) => (What::LocalElsewhere, Content::Syn),
        };
        refused::Wanted { what, ipv6: false, content, hook: self.hook }
    }
}

pub(super) fn wanted(effort: Effort, report: &mut Report) -> Vec<Wanted> {
    let works = [
        Work::Established(Kind::Request),
        Work::Established(Kind::Reply),
        Work::Refused(What::LocalElsewhere, Content::Syn),
        Work::Refused(What::WithoutFlow, Content::Ack),
    ];
    let hooks: &[Hook] = if effort.full { &[Hook::Xdp, Hook::Ingress] } else { &[Hook::Xdp] };
    let mut wanted = Vec::new();
    for work in works {
        for hook in hooks {
            for apart in [false, true] {
                let row = Wanted { work, hook: *hook, apart };
                // Two CPUs execute no fewer instructions than one.
                if !effort.counted && report.wants(GROUP, &row.name()) {
                    wanted.push(row);
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
    if wanted.is_empty() {
        return Ok(());
    }
    let Some(other) = other_cpu()? else {
        wanted.iter().for_each(|row| report.skip(GROUP, &row.name(), "there is one CPU"));
        return Ok(());
    };
    for row in wanted {
        report.measure(|| {
            let mut runs = Runs::default();
            for _ in 0..effort.loads() {
                let mut pair = Pair::load(*row, fixture, other)?;
                for _ in 0..effort.rounds_of(effort.loads()) {
                    pair.round(effort, &mut runs)?;
                }
            }
            Ok(vec![runs.row(*row)])
        })?;
    }
    Ok(())
}

/// Nanoseconds per packet.
#[derive(Default)]
struct Runs {
    alone: Vec<f64>,
    beside: Vec<f64>,
    /// Nanoseconds per packet of the other CPU meanwhile.
    other: Vec<f64>,
}

impl Runs {
    fn row(&self, row: Wanted) -> Row {
        match row.work {
            Work::Established(_) => {
                let own = Row::new(GROUP, &row.name(), Unit::Nanoseconds, &self.beside);
                let own = own.beside("quiet", &self.alone);
                if row.apart { own } else { own.goal(Goal::TimesAtMost(1.2)) }
            }
            Work::Refused(..) => {
                let one: Vec<_> = self.alone.iter().map(|alone| 1e3 / alone).collect();
                let both: Vec<_> =
                    self.beside.iter().zip(&self.other).map(|(a, b)| 1e3 / a + 1e3 / b).collect();
                let own = Row::new(GROUP, &row.name(), Unit::Mpps, &both).beside("one CPU", &one);
                if row.apart { own } else { own.goal(Goal::TimesAtLeast(1.5)) }
            }
        }
    }
}

/// The prepared packets of both CPUs.
struct Pair {
    row: Wanted,
    loaded: Loaded,
    companion: Companion,
    other: usize,
    windows: [Window; 2],
}

impl Pair {
    fn load(row: Wanted, fixture: &BenchNode, other: usize) -> Result<Self> {
        let sizes = MapSizes { unassured: PLACES, ..MapSizes::default() };
        let room = Room { frames: FLOOD, ..Room::default() };
        let setup = Setup { sizes, room, ..Setup::default() };
        let prepare = |loaded: &mut Loaded| {
            if matches!(row.work, Work::Refused(..)) {
                refused::prepare(loaded);
            }
        };
        let mut loaded = Loaded::new(fixture, setup)?;
        prepare(&mut loaded);
        let mut companion = if row.apart {
            Companion::apart(fixture, setup, row.hook, prepare)?
        } else {
            Companion::sharing(&loaded, fixture, row.hook)?
        };
        let windows = if let Work::Established(kind) = row.work {
            let open = open(&mut loaded, false, Protocol::Tcp, OPEN)?;
            let new = flows(false, Protocol::Tcp, OPEN + FLOOD).split_off(OPEN as usize);
            let own = loaded.feeder.place(&frames(&open, kind)?)?;
            [own, companion.feeder().place(&frames(&new, Kind::Opening)?)?]
        } else {
            companion.feeder().restore(Restored::Tail);
            let frames = row.refused().frames()?;
            [loaded.feeder.place(&frames)?, companion.feeder().place(&frames)?]
        };
        Ok(Self { row, loaded, companion, other, windows })
    }

    /// Measures this CPU's packets alone, and together with the other's.
    fn round(&mut self, effort: Effort, runs: &mut Runs) -> Result<()> {
        let Self { row, loaded, companion, other, windows: [own, others] } = self;
        let hook = row.hook;
        // Eight times as many packets as usual, so that this run outlasts one of the other CPU.
        let packets = (8 * effort.packets).next_multiple_of(own.len);
        let empty = loaded.run(Subject::Empty(hook), *own, packets)?.on_average;
        loaded.run(Subject::Ours(hook), *own, own.len)?;
        let alone = loaded.run(Subject::Ours(hook), *own, packets)?.on_average;
        let before = (loaded.outcomes(hook)?, loaded.made_and_removed()?);
        let refused_before = loaded.counted_by_services(row.refused().outcome())?;
        let their = match row.work {
            Work::Established(_) => others.len,
            Work::Refused(..) => effort.packets.next_multiple_of(others.len),
        };
        let (took, met, sent) =
            companion.during(*other, *others, their, || loaded.run(Subject::Ours(hook), *own, packets))?;
        let sent = if row.apart { 0 } else { sent };
        let (outcomes, [made, _]) = (loaded.outcomes(hook)?, loaded.made_and_removed()?);
        let count = |outcome: Outcome| outcomes[outcome.name()] - before.0[outcome.name()];
        let all = u64::from(packets) + sent;
        let right = match row.work {
            Work::Established(kind) => {
                let forwarded = if kind == Kind::Reply { sent } else { all };
                made - before.1[0] == sent
                    && count(Outcome::Forwarded) == forwarded
                    && count(Outcome::Replied) == all - forwarded
            }
            Work::Refused(..) => {
                let outcome = row.refused().outcome();
                let counted = loaded.counted_by_services(outcome)? - refused_before;
                count(outcome) == all && counted == all
            }
        };
        ensure!(right, "{packets} packets here and {sent} there ended otherwise");
        runs.alone.push(alone - empty);
        runs.beside.push(took.on_average - empty);
        if let Work::Refused(..) = row.work {
            let met: Vec<f64> = met.iter().map(|took| took.on_average - empty).collect();
            let sum = met.iter().sum::<f64>();
            ensure!(!met.is_empty(), "the other CPU had no whole run meanwhile");
            runs.other.push(sum / met.len() as f64);
        }
        Ok(())
    }
}
