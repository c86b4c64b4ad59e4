//! Sweeps of the flow table: how long they take, and for how long packets on the same CPU wait
//! meanwhile.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use aya::Ebpf;
use traffic_policy_dataplane::{Kernel, MapSizes, Maps, Sweeper, jumps, load, load_programs};
use traffic_policy_ebpf::tcp::Timeouts;

use super::{Rows, add, cpus, delay::Probe, full_table, wants};
use crate::{
    Effort,
    report::{Goal, Report, Row, Unit},
};

const GROUP: &str = "scale, sweep";
/// Rows for the duration of a sweep of these tables.
const TAKES: [&str; 3] = ["empty table, takes", "full table, takes", "full table whose flows all end, takes"];
/// Rows for the delay of a packet by a sweep: the longest wait in each.
const WAITS: [&str; 2] =
    ["longest wait of a packet, full table", "longest wait of a packet, full table whose flows all end"];
const WORST: [&str; 2] =
    ["the same, worst of all sweeps, full table", "the same, worst of all sweeps, all end"];
const BESIDE: &str = "no sweep";

fn rows() -> Rows {
    TAKES.iter().chain(&WAITS).chain(&WORST).map(|row| (GROUP, (*row).to_owned())).collect()
}

pub(super) fn measure(effort: Effort, report: &mut Report) -> Result<()> {
    if !wants(report, &rows()) {
        return Ok(());
    }
    let cpus = cpus::all()?;
    let Some((swept, others @ [_, ..])) = cpus.split_last() else {
        for (group, name) in rows() {
            report.skip(group, &name, "with one CPU it cannot be told from what the bench itself waits");
        }
        return Ok(());
    };
    let probe = Probe::build(*swept)?;
    let rounds = if effort.full { 20 } else { 8 };
    let around = |work: &mut (dyn FnMut() -> Result<()> + Send)| during(&probe, &[*swept], others, work);
    let [mut empty, mut full] = [Table::new()?, Table::new()?];
    full.fill()?;
    let [mut of_empty, mut of_full, mut of_none] = [const { Vec::new() }; 3];
    for _ in 0..rounds {
        of_empty.push(around(&mut || empty.sweep())?);
        of_full.push(around(&mut || full.sweep())?);
        let as_long = Duration::from_secs_f64(of_full[0].took / 1e3);
        of_none.push(around(&mut || {
            thread::sleep(as_long);
            Ok(())
        })?);
        ensure!(full.entries == full.size, "a sweep found {} entries, not {}", full.entries, full.size);
    }
    let mut of_ending = Vec::new();
    for _ in 0..rounds / 4 {
        full.fill()?;
        full.sweeper = sweeper(0);
        // The first sweep marks all flows, the second one deletes them.
        for _ in 0..2 {
            of_ending.push(around(&mut || full.sweep())?);
        }
        // At the boundary of two pieces, a deletion may hide a neighbour until the next sweep.
        let left = (full.size / 2).saturating_sub(full.deleted);
        ensure!(left <= full.size / 1_000, "a sweep left {left} flows that were over");
    }
    for (name, runs) in TAKES.into_iter().zip([&of_empty, &of_full, &of_ending]) {
        let took: Vec<_> = runs.iter().map(|run| run.took).collect();
        add(report, Row::new(GROUP, name, Unit::Milliseconds, &took));
    }
    let waits = |runs: &[Round]| -> Vec<f64> { runs.iter().map(|run| run.longest).collect() };
    let worst = |runs: &[Round]| waits(runs).into_iter().fold(0.0, f64::max);
    for (name, runs) in WAITS.into_iter().zip([&of_full, &of_ending]) {
        let row = Row::new(GROUP, name, Unit::Milliseconds, &waits(runs));
        add(report, row.beside(BESIDE, &waits(&of_none[..runs.len()])).goal(Goal::AtMost(1.0)));
    }
    // The reference is what this machine does to packets by itself in as many rounds.
    for (name, runs) in WORST.into_iter().zip([&of_full, &of_ending]) {
        let row = Row::new(GROUP, name, Unit::Milliseconds, &[worst(runs)]);
        add(report, row.beside(BESIDE, &[worst(&of_none[..runs.len()])]));
    }
    Ok(())
}

/// Figures of a round, in milliseconds.
struct Round {
    took: f64,
    /// The longest duration of an echo meanwhile.
    longest: f64,
}

/// Does work on one CPU, while packets that another CPU sends are answered there.
fn during(
    probe: &Probe,
    on: &[usize],
    others: &[usize],
    work: &mut (dyn FnMut() -> Result<()> + Send),
) -> Result<Round> {
    let ended = AtomicBool::new(false);
    let (took, echoes) = thread::scope(|scope| {
        let asking = scope.spawn(|| -> Result<Vec<Duration>> {
            cpus::run_on(others)?;
            probe.ask_until(&ended)
        });
        let working = scope.spawn(|| -> Result<Duration> {
            cpus::run_on(on)?;
            // The echoes are under way.
            thread::sleep(Duration::from_millis(5));
            let start = Instant::now();
            let worked = work();
            let took = start.elapsed();
            ended.store(true, Ordering::Relaxed);
            worked.map(|()| took)
        });
        let took = working.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        ended.store(true, Ordering::Relaxed);
        (took, asking.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    });
    let longest = echoes?.into_iter().max().context("nothing was answered")?;
    Ok(Round { took: took?.as_secs_f64() * 1e3, longest: longest.as_secs_f64() * 1e3 })
}

/// The packet path's tables with their default sizes, and its sweeper.
struct Table {
    object: Ebpf,
    tables: Maps,
    sweeper: Sweeper,
    size: u32,
    /// Result of the last sweep.
    entries: u32,
    deleted: u32,
}

impl Table {
    fn new() -> Result<Self> {
        let mut object = load(MapSizes::default(), None, &Kernel::running()?)?;
        load_programs(&mut object)?;
        let mut tables = Maps::take(&mut object)?;
        jumps(&object, &mut tables)?;
        let sweeper = sweeper(u32::MAX / 4);
        Ok(Self { object, tables, sweeper, size: MapSizes::default().flows4, entries: 0, deleted: 0 })
    }

    /// Fills the IPv4 table to the last entry.
    fn fill(&mut self) -> Result<()> {
        self.sweeper = sweeper(u32::MAX / 4);
        self.sweep()?;
        let now = self.tables.sweep.get(&0, 0)?.now;
        full_table::fill(&mut self.tables.v4.flows, self.size / 2, now)
    }

    fn sweep(&mut self) -> Result<()> {
        let (_, [found, _]) = self.sweeper.run(&self.object, &mut self.tables, false)?;
        (self.entries, self.deleted) = (found.entries, found.deleted);
        Ok(())
    }
}

/// Returns a sweeper for flows that may be idle for this number of jiffies. Its table is never
/// full, so that it removes none before.
fn sweeper(idle: u32) -> Sweeper {
    let timeouts = Timeouts {
        established: idle,
        half_closed: idle,
        finished: idle,
        reset: idle,
        unassured: idle,
        udp: idle,
        udp_answered: idle,
    };
    Sweeper::new(timeouts, [u32::MAX; 2])
}
