//! Sweeps of the flow table: how long they take, and for how long packets of the same CPU wait meanwhile.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use aya::Ebpf;
use traffic_policy_agent::dataplane::{Kernel, Sizes, Sweeper, Tables, jumps, load, load_programs};
use traffic_policy_ebpf::tcp::Timeouts;

use super::{cpus, delay::Probe, full_table};
use crate::{
    Effort,
    report::{Goal, Report, Row, Unit},
};

const GROUP: &str = "sweep";
/// Of one round without a sweep.
const QUIET: Duration = Duration::from_millis(100);

pub(super) fn measure(effort: Effort, report: &mut Report) -> Result<()> {
    let cpus = cpus::all()?;
    let Some((swept, others @ [_, ..])) = cpus.split_last() else {
        eprintln!("  a single CPU: what packets wait while it sweeps cannot be told from what the bench itself waits");
        return Ok(());
    };
    let probe = Probe::build(*swept)?;
    let rounds = if effort.large { 15 } else { 6 };
    let mut table = Table::new()?;
    let empty = during(&probe, &[*swept], others, rounds, || table.sweep())?;
    table.fill()?;
    let full = during(&probe, &[*swept], others, rounds, || table.sweep())?;
    ensure!(table.entries == table.size, "the sweeps found {} entries, not {}", table.entries, table.size);
    let none = during(&probe, &[*swept], others, rounds, || {
        thread::sleep(QUIET);
        Ok(())
    })?;
    // The next two, which mark all flows and then delete them, cannot be repeated without a new table.
    let mut emptying = Vec::new();
    for _ in 0..rounds.div_ceil(3) {
        let mut table = Table::new()?;
        table.fill()?;
        table.sweep()?;
        table.let_all_end();
        emptying.extend(during(&probe, &[*swept], others, 2, || table.sweep())?);
        ensure!(table.deleted == table.size / 2, "only {} flows were deleted", table.deleted);
    }
    for (name, runs) in [("empty table", &empty), ("full table", &full), ("full table, all flows end", &emptying)] {
        let took: Vec<_> = runs.iter().map(|run| run.took).collect();
        report.add(Row::new(GROUP, &format!("{name}, takes"), Unit::Milliseconds, &took));
    }
    let waits = |runs: &[Round]| -> Vec<f64> { runs.iter().map(|run| run.longest).collect() };
    for (name, runs) in [("full table", &full), ("full table, all flows end", &emptying)] {
        let row = Row::new(GROUP, &format!("{name}, a packet waits at most"), Unit::Milliseconds, &waits(runs));
        report.add(row.goal(Goal::AtMost(1.0)));
        let worst = waits(runs).into_iter().fold(0.0, f64::max);
        let row = Row::new(GROUP, &format!("{name}, worst of {} sweeps", runs.len()), Unit::Milliseconds, &[worst]);
        report.add(row.goal(Goal::AtMost(1.0)));
    }
    report.add(Row::new(GROUP, "no sweep, a packet waits at most", Unit::Milliseconds, &waits(&none)));
    Ok(())
}

/// Milliseconds.
struct Round {
    took: f64,
    /// The longest that an echo took meanwhile.
    longest: f64,
}

/// Works on one CPU, while packets that another one sends are answered there.
fn during(
    probe: &Probe,
    on: &[usize],
    others: &[usize],
    rounds: usize,
    mut work: impl FnMut() -> Result<()> + Send,
) -> Result<Vec<Round>> {
    let mut one = || -> Result<Round> {
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
    };
    (0..rounds).map(|_| one()).collect()
}

/// The packet path's tables with their default sizes, and its sweeper.
struct Table {
    object: Ebpf,
    tables: Tables,
    sweeper: Sweeper,
    size: u32,
    /// What the last sweep found.
    entries: u32,
    deleted: u32,
}

impl Table {
    fn new() -> Result<Self> {
        let mut object = load(Sizes::default(), None, &Kernel::running()?)?;
        load_programs(&mut object)?;
        let mut tables = Tables::take(&mut object)?;
        jumps(&object, &mut tables)?;
        let sweeper = sweeper(u32::MAX / 4);
        Ok(Self { object, tables, sweeper, size: Sizes::default().flows4, entries: 0, deleted: 0 })
    }

    /// Fills the IPv4 table to the last entry.
    fn fill(&mut self) -> Result<()> {
        self.sweep()?;
        let now = self.tables.sweep.get(&0, 0)?.now;
        full_table::fill(&mut self.tables.v4.flows, self.size / 2, now)
    }

    /// From now on flows end after no time at all.
    fn let_all_end(&mut self) {
        self.sweeper = sweeper(0);
    }

    fn sweep(&mut self) -> Result<()> {
        let [found, _] = self.sweeper.run(&self.object, &mut self.tables, false)?;
        (self.entries, self.deleted) = (found.entries, found.deleted);
        Ok(())
    }
}

/// For flows that may be idle for so many jiffies; of a table that is never full, so that it removes none before.
fn sweeper(idle: u32) -> Sweeper {
    let timeouts = Timeouts {
        established: idle,
        finished: idle,
        reset: idle,
        unconfirmed: idle,
        udp: idle,
        udp_answered: idle,
    };
    Sweeper::new(timeouts, [u32::MAX; 2])
}
