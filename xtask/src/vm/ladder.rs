//! `cargo xtask vm test`: suites on kernels, and the table of what came out.

use std::{
    collections::BTreeSet,
    process::ExitCode,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use clap::Args;

use super::{
    Built, Choice, Workshop,
    arch::Arch,
    budgets::Recorder,
    job::{self, Mark, Run},
    kernel::Kernel,
    machine::Machine,
    root::Root,
    series::{Series, Wanted},
    wires::{self, Wires},
};
use crate::tally::Tally;

/// Suites of the whole ladder, in the order of what rests on what. The first loads every program and holds each to its limits.
const SUITES: [&str; 7] = ["budgets", "packets", "policy", "sockets", "loss", DRIVERS, DEMO];
/// Needs network cards of the machine's own.
const DRIVERS: &str = "drivers";
/// Not a test program, but ends with an error where a scene does not play as told.
const DEMO: &str = "demo";
/// Run in parallel by a test program: as many as a machine has processors.
const THREADS: u32 = 2;

#[derive(Args)]
pub(super) struct Options {
    #[command(flatten)]
    choice: Choice,
    /// Suites or tests whose name contains this; `all`: the whole ladder on every kernel. Without it, the suites of the
    /// ladder on the oldest and the newest kernel
    filter: Option<String>,
}

pub(super) fn run(options: &Options) -> Result<ExitCode> {
    let whole = options.filter.as_deref() == Some("all");
    let otherwise: &[Wanted] = if whole { &[Wanted::All] } else { &[Wanted::Oldest, Wanted::Newest] };
    let workshop = options.choice.workshop(otherwise)?;
    let (root, built) = workshop.root()?;
    // Of suites that are named, each must have run a test; of a filter, one must.
    let (runs, least) = match options.filter.as_deref() {
        None | Some("all") => (suites(&built, &SUITES, None), SUITES.len()),
        Some(filter) => (matching(&built, filter), 1),
    };
    let ladder = Ladder::climb(&workshop, &root, &built, &runs);
    println!("\n{}", ladder.table());
    println!("{}", ladder.sum());
    Ok(if ladder.is_green(least) { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// What every run of the tests does: all programs load on the oldest and on the newest kernel, and a matrix of policies
/// passes there.
pub(crate) struct Smoke(Workshop);

impl Smoke {
    /// Fetches the kernels.
    ///
    /// # Errors
    /// Why no machine can be emulated here.
    pub(crate) fn prepare() -> Result<Self> {
        let arch = Arch::of_host().context("there are no kernels for this machine's architecture")?;
        Ok(Self(Workshop::open(arch, &[Wanted::Oldest, Wanted::Newest])?))
    }

    /// Whether all passed.
    ///
    /// # Errors
    /// The build failed, or the root disk cannot be made.
    pub(crate) fn run(&self, tally: &mut Tally) -> Result<bool> {
        let (root, built) = self.0.root()?;
        let mut runs = suites(&built, &["budgets"], Some("far_from_what_the_verifier_walks_at_most"));
        runs.extend(suites(&built, &["policy"], Some("matrix::one_agent_tc")));
        let ladder = Ladder::climb(&self.0, &root, &built, &runs);
        println!("\n{}", ladder.table());
        tally.add(ladder.sum());
        Ok(ladder.is_green(runs.len()))
    }
}

/// Suites by their names; of each, tests that match.
fn suites<'a>(built: &'a Built, names: &[&str], filter: Option<&str>) -> Vec<Run<'a>> {
    let found = names.iter().filter_map(|name| {
        if *name == DEMO {
            return Some(Run { name: DEMO.to_owned(), program: &built.demo, arguments: Vec::new() });
        }
        let (_, program) = built.suites.iter().find(|(known, _)| known == name)?;
        let mut arguments = vec![format!("--test-threads={THREADS}")];
        arguments.extend(filter.map(str::to_owned));
        Some(Run { name: (*name).to_owned(), program, arguments })
    });
    found.collect()
}

/// Whole suites whose name contains `filter`; if there are none, tests of all. `SUITE::TEST`: tests of one suite, with all that
/// they print.
fn matching<'a>(built: &'a Built, filter: &str) -> Vec<Run<'a>> {
    if let Some((suite, test)) = filter.split_once("::")
        && built.suites.iter().any(|(name, _)| name == suite)
    {
        let mut runs = suites(built, &[suite], Some(test));
        // Whoever asks for that little wants to see what it does.
        runs.iter_mut().for_each(|run| run.arguments.push("--nocapture".to_owned()));
        return runs;
    }
    let known = built.suites.iter().map(|(name, _)| name.as_str()).chain([DEMO]);
    let names: Vec<&str> = known.filter(|name| name.contains(filter)).collect();
    if !names.is_empty() {
        return suites(built, &names, None);
    }
    let all: Vec<&str> = built.suites.iter().map(|(name, _)| name.as_str()).collect();
    suites(built, &all, Some(filter))
}

/// One kernel's results.
struct Rung {
    kernel: String,
    results: Vec<(String, Outcome)>,
    took: Duration,
}

struct Outcome {
    tally: Tally,
    took: Duration,
}

struct Ladder(Vec<Rung>);

impl Ladder {
    fn climb(workshop: &Workshop, root: &Root, built: &Built, runs: &[Run<'_>]) -> Self {
        Self(workshop.kernels.iter().map(|kernel| rung(workshop, kernel, root, built, runs)).collect())
    }

    /// Whether on each kernel at least so many suites have run tests, and none failed.
    fn is_green(&self, least: usize) -> bool {
        self.0.iter().all(|rung| {
            rung.results.len() >= least && rung.results.iter().all(|(_, outcome)| outcome.tally.failed == 0)
        })
    }

    fn sum(&self) -> Tally {
        let mut sum = Tally::default();
        for rung in &self.0 {
            for (_, outcome) in &rung.results {
                sum.add(outcome.tally.clone());
            }
        }
        sum
    }

    /// Kernels down, suites across: a table that Markdown shows as one.
    fn table(&self) -> String {
        let mut names: Vec<&str> = Vec::new();
        let mut seen = BTreeSet::new();
        for (name, _) in self.0.iter().flat_map(|rung| &rung.results) {
            if seen.insert(name) {
                names.push(name);
            }
        }
        let mut text = format!("| kernel | {} | minutes |\n", names.join(" | "));
        text += &format!("|---|{}---|\n", "---|".repeat(names.len()));
        for rung in &self.0 {
            let cells = names.iter().map(|name| {
                let found = rung.results.iter().find(|(known, _)| known == name);
                found.map_or_else(|| "not run".to_owned(), |(_, outcome)| outcome.cell())
            });
            let minutes = rung.took.as_secs_f32() / 60.0;
            text +=
                &format!("| {} | {} | {minutes:.1} |\n", rung.kernel, cells.collect::<Vec<_>>().join(" | "));
        }
        text
    }
}

impl Outcome {
    fn cell(&self) -> String {
        let Tally { passed, failed, skipped, .. } = &self.tally;
        let mut text = format!("{passed} of {}", passed + failed);
        if *failed > 0 {
            text = format!("**{text}**");
        }
        if *skipped > 0 {
            text += &format!(", {skipped} skipped");
        }
        format!("{text} ({:.0} s)", self.took.as_secs_f32())
    }
}

/// Boots one kernel and runs everything there.
fn rung(workshop: &Workshop, kernel: &Kernel, root: &Root, built: &Built, runs: &[Run<'_>]) -> Rung {
    let started = Instant::now();
    println!("\n=== Linux {} ({}): booting", kernel.release, workshop.arch);
    match climb_one(workshop, kernel, root, built, runs, started) {
        Ok(results) => {
            let rung = Rung { kernel: kernel.series.to_string(), results, took: started.elapsed() };
            for (suite, outcome) in &rung.results {
                println!("=== Linux {}: {suite}: {}", kernel.release, outcome.cell());
            }
            rung
        }
        Err(error) => {
            println!("Error: {error:#}");
            Rung { kernel: kernel.series.to_string(), results: Vec::new(), took: started.elapsed() }
        }
    }
}

fn climb_one(
    workshop: &Workshop,
    kernel: &Kernel,
    root: &Root,
    built: &Built,
    runs: &[Run<'_>],
    started: Instant,
) -> Result<Vec<(String, Outcome)>> {
    let name = kernel.series;
    let wires = if runs.iter().any(|run| run.name == DRIVERS) {
        Some(Wires::make(&format!("tp-vm-{}", std::process::id()), wires::pairs())?)
    } else {
        None
    };
    let machine = Machine {
        arch: workshop.arch,
        kernel,
        root,
        job: job::script(built, runs),
        devices: wires.iter().flat_map(|wires| Wires::arguments(wires.cards())).collect(),
        netns: wires.as_ref().map(|wires| wires.netns.0.clone()),
        folder: workshop.folder.join(format!(
            "runs/{}-{}-{}",
            workshop.arch,
            kernel.release,
            std::process::id()
        )),
    };
    let mut run = follow(&machine, name, started);
    if let Err(error) = &run.ended {
        // An emulated processor fails once in a while; what our programs do to a kernel, they do to the next one, too.
        println!("[{name}] Error: {error:#}\n[{name}] once more, in a new machine …");
        run = follow(&machine, name, started);
    }
    let Followed { mut results, ended } = run;
    if let Err(error) = ended {
        println!("[{name}] Error: {error:#}");
        let mut tally = Tally::default();
        tally.close("the machine", 1);
        results.push(("boot".to_owned(), Outcome { tally, took: started.elapsed() }));
    }
    // The console's log of a failure is what one needs next.
    if results.iter().all(|(_, outcome)| outcome.tally.failed == 0) {
        let _ = std::fs::remove_dir_all(&machine.folder);
    }
    results.retain(|(_, outcome)| outcome.tally.counted() > 0);
    Ok(results)
}

/// What a machine said, and whether it got to the end of its job.
struct Followed {
    results: Vec<(String, Outcome)>,
    ended: Result<()>,
}

fn follow(machine: &Machine<'_>, name: Series, started: Instant) -> Followed {
    let mut results: Vec<(String, Outcome)> = Vec::new();
    let mut begun = Instant::now();
    let mut recorder = Recorder::default();
    let ended = machine.run(|line| match job::mark(line) {
        Mark::Begin(suite) => {
            begun = Instant::now();
            results.push((suite.to_owned(), Outcome { tally: Tally::default(), took: Duration::ZERO }));
        }
        Mark::End(code) => {
            if let Some((suite, outcome)) = results.last_mut() {
                outcome.took = begun.elapsed();
                outcome.tally.close(suite, code);
            }
        }
        Mark::Output(text) => {
            if !is_nothing(text) {
                println!("[{name} {:4.0} s] {text}", started.elapsed().as_secs_f32());
            }
            if let Some((_, outcome)) = results.last_mut() {
                outcome.tally.note(text);
            }
            if let Err(error) = recorder.follow(text) {
                println!("Error: {error:#}");
            }
        }
    });
    Followed { results, ended }
}

/// Whether a test program only says that no test of its was meant.
fn is_nothing(line: &str) -> bool {
    line.is_empty()
        || line == "running 0 tests"
        || line.starts_with("test result: ok. 0 passed; 0 failed; 0 ignored")
}
