//! `cargo xtask vm test`: suites on kernels, and the table of their results.

mod climb;
mod selection;

use std::{collections::BTreeSet, process::ExitCode};

use anyhow::{Context, Result};
use clap::Args;

use self::{
    climb::{Climb, Rung},
    selection::{DEMO, SUITES},
};
use super::{Built, Choice, Workshop, arch::Arch, job::Run, machine::PROCESSORS, series::Wanted};
use crate::tally::Tally;

/// The number of simultaneous tests of a test program: the number of a machine's processors.
const THREADS: u32 = 2;

#[derive(Args)]
pub(super) struct Options {
    #[command(flatten)]
    choice: Choice,
    /// Suites or tests whose name contains this, or several separated by commas; `all`: the whole
    /// ladder on every kernel; `smoke`: the part that every `cargo xtask test` runs. Without it,
    /// the suites of the ladder on the oldest and the newest kernel
    filter: Option<String>,
    /// Run whole suites on the ladder also where processors are emulated: takes a day instead of an
    /// hour or two
    #[arg(long)]
    whole: bool,
}

pub(super) fn run(options: &Options) -> Result<ExitCode> {
    if options.filter.as_deref() == Some("smoke") {
        let mut tally = Tally::default();
        let green = Smoke::prepare()?.run(&mut tally)?;
        println!("{tally}");
        return Ok(if green { ExitCode::SUCCESS } else { ExitCode::FAILURE });
    }
    let whole = options.filter.as_deref() == Some("all");
    let otherwise: &[Wanted] = if whole { &[Wanted::All] } else { &[Wanted::Oldest, Wanted::Newest] };
    let workshop = options.choice.workshop(otherwise)?;
    let built = Built::all(workshop.arch)?;
    // Each suite of the ladder must have run a test; with filters, there must be one for each
    // filter.
    let (runs, least) = match options.filter.as_deref() {
        None | Some("all") => (of_the_ladder(&built, options.whole), SUITES.len()),
        Some(filters) => (
            filters.split(',').flat_map(|filter| matching(&built, filter)).collect(),
            filters.split(',').count(),
        ),
    };
    let root = workshop.root(&built, runs.iter().map(|run| run.program.clone()))?;
    let climb =
        Climb { workshop: &workshop, root: &root, built: &built, runs: &runs, processors: PROCESSORS };
    // The table is printed after each kernel, so that it is available when the command is stopped
    // after an hour.
    let ladder = Ladder(climb.in_turn(|so_far| println!("\n{}", table(so_far))));
    println!("{}", ladder.sum());
    Ok(if ladder.is_green(least) { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The kernels of every run of the tests: on the oldest and on the newest one all programs load,
/// and a matrix of policies passes, and SCTP by sockets. Both machines run at the same time with
/// one processor each, which takes the least time on two.
pub(crate) struct Smoke(Workshop);

impl Smoke {
    /// Fetches the kernels.
    ///
    /// # Errors
    /// No machine can be emulated here; the error has the reason.
    pub(crate) fn prepare() -> Result<Self> {
        let arch = Arch::of_host().context("there are no kernels for this machine's architecture")?;
        Ok(Self(Workshop::open(arch, &[Wanted::Oldest, Wanted::Newest])?))
    }

    /// Runs the tests. Returns whether all passed.
    pub(crate) fn run(&self, tally: &mut Tally) -> Result<bool> {
        let built = Built::all(self.0.arch)?;
        let mut runs = suites(&built, &["budgets"], Some("far_from_what_the_verifier_walks_at_most"));
        let mut policy = suites(&built, &["policy"], Some("matrix::one_agent_tc"));
        // These kernels have SCTP, unlike those of many hosts.
        policy.iter_mut().for_each(|run| run.arguments.push("sctp_sockets::live_by_tc".to_owned()));
        runs.extend(policy);
        let root = self.0.root(&built, runs.iter().map(|run| run.program.clone()))?;
        let climb = Climb { workshop: &self.0, root: &root, built: &built, runs: &runs, processors: 1 };
        let ladder = Ladder(climb.side_by_side());
        println!("\n{}", table(&ladder.0));
        tally.add(ladder.sum());
        Ok(ladder.is_green(runs.len()))
    }
}

/// Returns the suites of the ladder; where processors are emulated only the tests that represent
/// them, unless `whole` is set.
fn of_the_ladder(built: &Built, whole: bool) -> Vec<Run> {
    let selected = !whole && !built.arch.has_kvm();
    if selected {
        print!("{}", selection::announcement());
    }
    let found = SUITES.iter().flat_map(|suite| {
        let mut runs = suites(built, &[suite.name], None);
        if selected && !suite.emulated.is_empty() {
            for run in &mut runs {
                run.selected = Some(suite.emulated.len() as u64);
                run.arguments.push("--exact".to_owned());
                run.arguments.extend(suite.emulated.iter().map(|&test| test.to_owned()));
            }
        }
        runs
    });
    found.collect()
}

/// Returns suites by their names, each with the tests that match.
fn suites(built: &Built, names: &[&str], filter: Option<&str>) -> Vec<Run> {
    let found = names.iter().filter_map(|name| {
        if *name == DEMO {
            let (name, program) = (DEMO.to_owned(), built.program(DEMO));
            return Some(Run { name, program, arguments: Vec::new(), selected: None });
        }
        let (_, program) = built.suites.iter().find(|(known, _)| known == name)?.clone();
        let mut arguments = vec![format!("--test-threads={THREADS}")];
        arguments.extend(filter.map(str::to_owned));
        Some(Run { name: (*name).to_owned(), program, arguments, selected: None })
    });
    found.collect()
}

/// Returns the suites whose name contains `filter`; if there are none, matching tests of all
/// suites. `SUITE::TEST` selects tests of one suite, with all of their output.
fn matching(built: &Built, filter: &str) -> Vec<Run> {
    if let Some((suite, test)) = filter.split_once("::")
        && built.suites.iter().any(|(name, _)| name == suite)
    {
        let mut runs = suites(built, &[suite], Some(test));
        // A user who selects this little wants to see the output.
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

struct Ladder(Vec<Rung>);

impl Ladder {
    /// Whether on each kernel at least `least` suites have run tests, and none failed.
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
}

/// Formats a table with kernels as rows and suites as columns, in the syntax of Markdown.
fn table(rungs: &[Rung]) -> String {
    let mut names: Vec<&str> = Vec::new();
    let mut seen = BTreeSet::new();
    for (name, _) in rungs.iter().flat_map(|rung| &rung.results) {
        if seen.insert(name) {
            names.push(name);
        }
    }
    let mut text = format!("| kernel | {} | minutes |\n", names.join(" | "));
    text += &format!("|---|{}---|\n", "---|".repeat(names.len()));
    for rung in rungs {
        let cells = names.iter().map(|name| {
            let found = rung.results.iter().find(|(known, _)| known == name);
            found.map_or_else(|| "not run".to_owned(), |(_, outcome)| outcome.cell())
        });
        let minutes = rung.took.as_secs_f32() / 60.0;
        text += &format!("| {} | {} | {minutes:.1} |\n", rung.kernel, cells.collect::<Vec<_>>().join(" | "));
    }
    text
}
