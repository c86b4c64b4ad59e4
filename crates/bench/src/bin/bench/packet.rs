//! Cost of one packet, by BPF_PROG_TEST_RUN.

mod direct;
mod established;
mod floor;
mod foreign;
mod fresh;
mod jumbo;
mod refused;
mod two_cpus;

use anyhow::Result;
use traffic_policy_bench::{BenchNode, Case, Expected, Frame, Hook, Loaded, Subject, turns};
use traffic_policy_ebpf::outcome::Outcome;

use super::{Effort, report::Report};

/// Number of times that the programs are loaded afresh for one row. The kernel places a program's
/// code, and maps, at another address each time; for some tens of nanoseconds that alone makes 5 %
/// or more.
const LOADS: usize = 4;

/// Measures the costs of some rows with each of several loads, and combines them.
fn over_loads<T, R, const N: usize>(
    loads: usize,
    rows: &[R],
    mut load: impl FnMut() -> Result<T>,
    mut costs: impl FnMut(&mut T, &R) -> Result<[Vec<f64>; N]>,
) -> Result<Vec<[Vec<f64>; N]>> {
    let mut all = vec![[const { Vec::new() }; N]; rows.len()];
    for _ in 0..loads {
        let mut loaded = load()?;
        for (all, row) in all.iter_mut().zip(rows) {
            for (all, runs) in all.iter_mut().zip(costs(&mut loaded, row)?) {
                all.extend(runs);
            }
        }
    }
    Ok(all)
}

/// Returns the name of an address family.
fn family(ipv6: bool) -> &'static str {
    if ipv6 { "IPv6" } else { "IPv4" }
}

/// The packets of a row, none of which affects the fate of the next.
struct Packets {
    frames: Vec<Frame>,
    hook: Hook,
    outcome: Outcome,
    /// Expected result for the first packet.
    expected: Expected,
}

/// Measures the costs of rows of such packets in the packet path, without a reference.
fn alone<R>(
    rows: &[R],
    effort: Effort,
    load: impl FnMut() -> Result<Loaded>,
    packets: impl Fn(&R) -> Result<Packets>,
) -> Result<Vec<[Vec<f64>; 1]>> {
    over_loads(effort.loads(), rows, load, |loaded, row| {
        let Packets { frames, hook, outcome, expected } = packets(row)?;
        loaded.feeder.clear();
        let window = loaded.feeder.place(&frames)?;
        let case = Case { subject: Subject::Ours(hook), window, outcome, expected };
        turns::costs(loaded, effort.rounds_of(effort.loads()), effort.packets, &[case])
    })
}

impl Effort {
    /// Returns the number of fresh loads of a row: the memory address of a program changes its
    /// time, but no count of instructions.
    fn loads(self) -> usize {
        if self.counted { 1 } else { LOADS }
    }

    /// Returns the rounds with each load, if there are this many loads.
    fn rounds_of(self, loads: usize) -> usize {
        (self.rounds * 3 / 2).div_ceil(loads)
    }
}

pub(crate) fn measure(effort: Effort, report: &mut Report) -> Result<()> {
    let floor = floor::wanted(effort, report);
    let established = established::wanted(effort, report);
    let fresh = fresh::wanted(effort, report);
    let refused = refused::wanted(effort, report);
    let foreign = foreign::wanted(report);
    let two_cpus = two_cpus::wanted(effort, report);
    let jumbo = jumbo::wanted(report);
    let direct = direct::wanted(effort, report);
    if floor.is_empty()
        && established.is_empty()
        && fresh.is_empty()
        && refused.is_empty()
        && foreign.is_empty()
        && two_cpus.is_empty()
        && jumbo.is_empty()
        && direct.is_empty()
    {
        return Ok(());
    }
    let fixture = BenchNode::build()?;
    fixture.run(|| {
        floor::measure(&floor, &fixture, effort, report)?;
        established::measure(&established, &fixture, effort, report)?;
        fresh::measure(&fresh, &fixture, effort, report)?;
        refused::measure(&refused, &fixture, effort, report)?;
        foreign::measure(&foreign, &fixture, effort, report)?;
        two_cpus::measure(&two_cpus, &fixture, effort, report)?;
        jumbo::measure(&jumbo, &fixture, effort, report)?;
        direct::measure(&direct, &fixture, effort, report)
    })
}
