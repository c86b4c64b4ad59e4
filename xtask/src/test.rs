//! `cargo xtask test` runs all checks, and continues after a failure: the build, tests that need
//! the machine for themselves, all others from one queue with the lints in the background, and at
//! last the emulated machines.

mod background;
mod cost;
mod plan;
mod processors;
mod program;
mod queue;

use std::{
    env,
    ffi::OsString,
    num::NonZeroUsize,
    path::PathBuf,
    process::{Command, ExitCode},
    sync::{Mutex, PoisonError},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use clap::Args;

pub(crate) use self::cost::Cost;
use self::{
    cost::Known,
    plan::{Company, Job},
    program::Program as TestProgram,
    queue::Slots,
};
use crate::{
    cargo, image, lint,
    setup::{self, programs},
    tally::Tally,
    vm,
};

/// The packages whose tests need root.
const PRIVILEGED: [&str; 6] = [
    "traffic-policy-bench",
    "traffic-policy-fuzz",
    "traffic-policy-lab",
    "traffic-policy-packets",
    "traffic-policy-testing",
    "traffic-policy-tests",
];

/// Container engines; the first one suffices for most tests.
const CONTAINERS: [programs::Program<'static>; 3] =
    [("crun", "crun"), ("podman", "podman"), ("containerd", "containerd")];
const NO_CONTAINERS: &str = "tests with containers are skipped";
/// The emulator that runs the program of the image for the other architecture.
const EMULATOR: [programs::Program<'static>; 1] = [if cfg!(target_arch = "x86_64") {
    ("qemu-aarch64-static", "qemu-user-static")
} else {
    ("qemu-x86_64-static", "qemu-user-static")
}];

/// The variable of the harness that sets the number of simultaneous tests.
const THREADS: &str = "RUST_TEST_THREADS";

/// Variables that make tests write the files with which they otherwise compare. Several tests write
/// into one file, and take turns.
const WRITING: [&str; 3] = ["UPDATE_BUDGETS", "UPDATE_DOCS", "UPDATE_EXPECTED"];

/// The suites, or single tests, that `quick` runs in addition to unit tests.
const QUICK: [&str; 3] = ["packets", "documents", "policy::matrix::one_agent_tc"];

#[derive(Args)]
pub(crate) struct Options {
    /// Run only tests whose name, or whose suite's name, contains this, or SUITE::TEST, without
    /// style checks; `lints`: only these; `quick`: style, lints, unit tests, packets, a matrix of
    /// policies and documents; `image`: the tests of deploy/ with the image that users load, which
    /// is built first
    filter: Option<String>,
}

/// A test program that cargo is about to run; see [`run_test`].
#[derive(Args)]
pub(crate) struct Program {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    command: Vec<OsString>,
}

pub(crate) fn run(options: &Options) -> Result<ExitCode> {
    let mut stages = Stages { started: Instant::now(), tally: Tally::default(), table: Vec::new() };
    stages.one("set-up", |_| setup::ensure().map(|()| true));
    match &options.filter {
        None => everything(&mut stages)?,
        Some(filter) if filter == "lints" => lints(&mut stages),
        Some(filter) if filter == "quick" => quick(&mut stages),
        Some(filter) if filter == "image" => of_the_image(&mut stages),
        Some(filter) => matching(&mut stages, filter)?,
    }
    Ok(stages.close())
}

fn everything(stages: &mut Stages) -> Result<()> {
    stages.one("style: cargo fmt", style);
    let Some((tests, kernels)) = built_and_fetched(stages) else { return Ok(()) };
    let (alone, others): (Vec<_>, Vec<_>) =
        plan::jobs(&tests, &Known::read()).into_iter().partition(|job| job.company == Company::Alone);
    let (few, others): (Vec<_>, Vec<_>) = others.into_iter().partition(|job| job.company == Company::Few);
    stages.one("tests that run alone: time, floods", |tally| Ok(run_jobs(&alone, tally)));
    let few = |tally: &mut Tally| Ok(run_jobs(&few, tally));
    let others = |tally: &mut Tally| Ok(run_jobs(&others, tally));
    stages.at_once(&[
        Row::of(&[("tests of loss", &few), ("unit, packet, model and namespace tests", &others)]),
        // Most tests wait for something most of their time.
        Row { background: true, ..Row::of(&[LINTS, DOC, LINTS_BPF, DOC_BPF, DOC_TESTS]) },
    ]);
    // These do not run beside others, where an emulated kernel answers no netlink request in ten
    // seconds.
    stages.one("Linux 6.1 and the newest, emulated", |tally| other_kernels(kernels, tally));
    Ok(())
}

/// Builds everything, while downloads wait for the network. Returns the test programs, each with
/// its tests, and the kernels.
///
/// Not a part of it later, in the background of the tests of loss: of two runs, each had one of
/// these fail meanwhile, once because the machine was 780 ms late.
fn built_and_fetched(stages: &mut Stages) -> Option<(Tests, Result<vm::Smoke>)> {
    let (tests, kernels) = (Mutex::new(None), Mutex::new(None));
    let build = |_: &mut Tally| {
        *tests.lock().unwrap_or_else(PoisonError::into_inner) = Some(build()?);
        Ok(true)
    };
    // Debian's package manager runs once at a time, so they are one stage.
    let fetch = |_: &mut Tally| {
        programs::prepare(&CONTAINERS[..1], NO_CONTAINERS);
        programs::prepare(&programs::READERS, programs::NO_READERS);
        programs::prepare(&programs::BROWSER, programs::NO_BROWSER);
        programs::prepare(&programs::RULES, programs::NO_RULES);
        *kernels.lock().unwrap_or_else(PoisonError::into_inner) = Some(vm::Smoke::prepare());
        // What is missing is reported by the tests that skip for want of it.
        Ok(true)
    };
    stages.at_once(&[
        Row::of(&[("build", &build)]),
        Row::of(&[("programs and kernels that tests need", &fetch)]),
    ]);
    let tests = tests.into_inner().unwrap_or_else(PoisonError::into_inner)?;
    let kernels = kernels.into_inner().unwrap_or_else(PoisonError::into_inner);
    Some((tests, kernels.unwrap_or_else(vm::Smoke::prepare)))
}

/// Runs the checks that a contributor needs after each change.
fn quick(stages: &mut Stages) {
    stages.one("style: cargo fmt", style);
    stages.one("lints: cargo clippy", lint::clippy);
    let Some(tests) = built(stages) else { return };
    let tests = selected(tests, |suite, unit, test| {
        unit || QUICK.iter().any(|&wanted| wanted == suite || wanted == cost::test_name(suite, test))
    });
    let jobs = plan::jobs(&tests, &Known::read());
    stages.one("unit tests, packets, documents, a matrix of policies", |tally| Ok(run_jobs(&jobs, tally)));
}

fn style(_: &mut Tally) -> Result<bool> {
    succeeds(cargo::cargo().args(["fmt", "--all", "--check"]))
}

const LINTS: Stage<'static> = ("lints: cargo clippy", &lint::clippy);
const DOC: Stage<'static> = ("documentation: cargo doc", &lint::doc);
const LINTS_BPF: Stage<'static> = ("lints of the packet path: cargo clippy for BPF", &lint::clippy_bpf);
const DOC_BPF: Stage<'static> = ("documentation of the packet path: cargo rustdoc for BPF", &lint::doc_bpf);
const DOC_TESTS: Stage<'static> = ("documentation tests", &documentation_tests);

fn lints(stages: &mut Stages) {
    stages.one("style: cargo fmt", style);
    // The packet path has a target folder of its own, and `core`, which is compiled for it first,
    // keeps one CPU busy.
    stages.at_once(&[Row::of(&[LINTS, DOC]), Row::of(&[LINTS_BPF, DOC_BPF])]);
}

/// Runs the suite of `deploy/` with the image itself and the container engines of Debian.
fn of_the_image(stages: &mut Stages) {
    programs::prepare(&CONTAINERS, NO_CONTAINERS);
    programs::prepare(&EMULATOR, "the other machine's program is not started");
    let mut archive = PathBuf::new();
    let made = stages.one("image", |_| {
        archive = image::for_both()?;
        Ok(true)
    });
    if made {
        let Some(tests) = built(stages) else { return };
        let tests = selected(tests, |suite, _, _| suite == "deploy");
        let jobs = plan::jobs(&tests, &Known::read());
        stages.one("tests of deploy, by the image", |tally| {
            Ok(queue::run(&jobs, slots(), &[("TRAFFIC_POLICY_IMAGE", archive)], tally))
        });
    }
}

fn matching(stages: &mut Stages, filter: &str) -> Result<()> {
    let Some(tests) = built(stages) else { return Ok(()) };
    if filter.contains("deploy") || filter.contains("container") {
        programs::prepare(&CONTAINERS[..1], NO_CONTAINERS);
    }
    if filter.contains("deploy") {
        programs::prepare(&programs::READERS, programs::NO_READERS);
    }
    // Tests of many suites write rules into the namespaces of their labs.
    programs::prepare(&programs::RULES, programs::NO_RULES);
    if filter.contains("page") {
        programs::prepare(&programs::BROWSER, programs::NO_BROWSER);
    }
    // `SUITE::TEST`, as in `cargo xtask vm test`.
    let named =
        filter.split_once("::").filter(|(suite, _)| tests.iter().any(|(program, _)| program.suite == *suite));
    let tests = selected(tests, |suite, _, test| match named {
        Some((named, within)) => suite == named && test.contains(within),
        None => suite.contains(filter) || test.contains(filter),
    });
    let jobs = plan::jobs(&tests, &Known::read());
    stages.one(&format!("tests named {filter}"), |tally| Ok(run_jobs(&jobs, tally)));
    if stages.tally.passed + stages.tally.failed == 0 {
        let folders = cargo::SUITES.join(" ");
        bail!("no test or suite has {filter:?} in its name: `ls {folders}` are the suites");
    }
    Ok(())
}

fn succeeds(command: &mut Command) -> Result<bool> {
    Ok(cargo::status(command)?.success())
}

/// Test programs, each with its tests.
type Tests = Vec<(TestProgram, Vec<String>)>;

/// Builds the agent, which tests start as a user would, and all test programs. Returns these, each
/// with its tests.
fn build() -> Result<Tests> {
    let found = TestProgram::all()?.into_iter();
    found.map(|program| program.tests().map(|tests| (program, tests))).collect()
}

/// [Builds][build] in a stage of its own.
fn built(stages: &mut Stages) -> Option<Tests> {
    let mut tests = None;
    stages.one("build", |_| {
        tests = Some(build()?);
        Ok(true)
    });
    tests
}

/// Returns the selected tests; `wanted` gets the suite, whether it has unit tests, and the test's
/// name.
fn selected(tests: Tests, wanted: impl Fn(&str, bool, &str) -> bool) -> Tests {
    let of = |(program, mut tests): (TestProgram, Vec<String>)| {
        tests.retain(|test| wanted(&program.suite, program.unit, test));
        (program, tests)
    };
    tests.into_iter().map(of).collect()
}

fn run_jobs(jobs: &[Job<'_>], tally: &mut Tally) -> bool {
    queue::run(jobs, slots(), &[], tally)
}

/// Tests on the oldest and the newest kernel, where machines can be emulated.
fn other_kernels(kernels: Result<vm::Smoke>, tally: &mut Tally) -> Result<bool> {
    let kernels = match kernels {
        Ok(kernels) => kernels,
        Err(error) => {
            println!("SKIPPED other kernels: {error:#}");
            tally.skipped += 1;
            return Ok(true);
        }
    };
    kernels.run(tally)
}

/// Runs the documentation tests, always of the whole workspace: see [`crate::build::workspace`].
fn documentation_tests(tally: &mut Tally) -> Result<bool> {
    let own = env::current_exe().context("this program's own path is unknown")?;
    let mut command = cargo::cargo();
    if !cargo::is_root() {
        // The build belongs to the user; only test programs that need root run as root.
        let runner = format!("target.'cfg(all())'.runner = ['{}', 'run-test', '--']", own.display());
        command.args(["--config", &runner]);
    }
    command.args(["test", "--workspace", "--no-fail-fast", "--doc"]);
    tally.run(&mut command)
}

/// Returns the number of simultaneous tests: one and a half times the number of CPUs, since most
/// tests wait half of their time, for an agent, an answer or silence; and more while all running
/// tests wait, up to eight times that of the CPUs. Tests that measure loss take a quarter of two
/// CPUs each.
fn slots() -> Slots {
    if let Some(set) = env::var(THREADS).ok().and_then(|number| number.parse().ok()) {
        return Slots { always: set, most: set, few: set.min(2) };
    }
    if WRITING.iter().any(|variable| env::var_os(variable).is_some()) {
        return Slots { always: 1, most: 1, few: 1 };
    }
    let cpus = thread::available_parallelism().map_or(1, NonZeroUsize::get);
    Slots { always: cpus + cpus / 2, most: 8 * cpus, few: cpus + cpus / 2 }
}

/// Runs one test program, as root if it belongs to a package that needs it. Called by cargo.
pub(crate) fn run_test(program: &Program) -> Result<ExitCode> {
    let (name, arguments) = program.command.split_first().context("no program to run")?;
    let mut command =
        if env::var("CARGO_PKG_NAME").is_ok_and(|package| PRIVILEGED.contains(&package.as_str())) {
            cargo::privileged(name)
                .context("these tests need root: run `cargo xtask test` as root, or install sudo")?
        } else {
            Command::new(name)
        };
    cargo::exit_code(command.args(arguments))
}

/// A stage with its name; another thread may run it.
type Stage<'a> = (&'a str, &'a (dyn Fn(&mut Tally) -> Result<bool> + Sync));

/// Stages that run one after the other.
struct Row<'a> {
    stages: &'a [Stage<'a>],
    /// Whether they take only the time of the processors that others leave.
    background: bool,
}

impl<'a> Row<'a> {
    const fn of(stages: &'a [Stage<'a>]) -> Self {
        Self { stages, background: false }
    }
}

/// The results of the stages so far.
struct Stages {
    started: Instant,
    tally: Tally,
    /// Name, success and duration.
    table: Vec<(String, bool, Duration)>,
}

impl Stages {
    /// Runs a stage. Returns whether it succeeded.
    fn one(&mut self, name: &str, stage: impl FnOnce(&mut Tally) -> Result<bool>) -> bool {
        println!("\n=== {name}");
        let started = Instant::now();
        let succeeded = stage(&mut self.tally).unwrap_or_else(|error| {
            println!("Error: {error:#}");
            false
        });
        let took = started.elapsed();
        println!("=== {name}: {}, {:.1} s", if succeeded { "ok" } else { "FAILED" }, took.as_secs_f32());
        self.table.push((name.to_owned(), succeeded, took));
        succeeded
    }

    /// Runs rows of stages in parallel.
    fn at_once(&mut self, rows: &[Row<'_>]) {
        let part = |_: &_| Self { started: self.started, tally: Tally::default(), table: Vec::new() };
        let mut parts: Vec<Self> = rows.iter().map(part).collect();
        thread::scope(|scope| {
            for (part, row) in parts.iter_mut().zip(rows) {
                scope.spawn(move || {
                    if row.background
                        && let Err(error) = background::enter()
                    {
                        println!("Not in the background: {error:#}");
                    }
                    for (name, stage) in row.stages {
                        part.one(name, stage);
                    }
                });
            }
        });
        for part in parts {
            self.tally.add(part.tally);
            self.table.extend(part.table);
        }
    }

    /// Prints the summary; its last line is for programs, too.
    fn close(self) -> ExitCode {
        println!("\n=== summary, {:.0} s in all", self.started.elapsed().as_secs_f32());
        for (name, succeeded, took) in &self.table {
            println!("{:>6.1} s  {:6}  {name}", took.as_secs_f32(), if *succeeded { "ok" } else { "FAILED" });
        }
        if !self.tally.failures.is_empty() {
            println!("Failed tests:");
        }
        for name in &self.tally.failures {
            println!("  {name}");
        }
        if let Err(error) = cost::conclude(&self.table, &self.tally.costs) {
            println!("The cost cannot be kept: {error:#}");
        }
        println!("{}", self.tally);
        let all = self.table.iter().all(|(_, succeeded, _)| *succeeded) && self.tally.failed == 0;
        if all { ExitCode::SUCCESS } else { ExitCode::FAILURE }
    }
}
