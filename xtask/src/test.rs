//! `cargo xtask test`: everything that can fail, one stage after the other, also after a failure.

use std::{
    env,
    ffi::OsString,
    fs,
    num::NonZeroUsize,
    path::PathBuf,
    process::{Command, ExitCode},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use clap::Args;

use crate::{
    build, cargo, image, lint,
    setup::{self, programs},
    tally::Tally,
    vm,
};

/// The packages whose tests need root.
const PRIVILEGED: [&str; 5] = [
    "traffic-policy-bench",
    "traffic-policy-fuzz",
    "traffic-policy-lab",
    "traffic-policy-testing",
    "traffic-policy-tests",
];

/// Container engines; the first alone does for most tests.
const CONTAINERS: [programs::Program<'static>; 3] =
    [("crun", "crun"), ("podman", "podman"), ("containerd", "containerd")];
const NO_CONTAINERS: &str = "tests with containers are skipped";
/// Runs the program of the image that is for the other machine.
const EMULATOR: [programs::Program<'static>; 1] = [if cfg!(target_arch = "x86_64") {
    ("qemu-aarch64-static", "qemu-user-static")
} else {
    ("qemu-x86_64-static", "qemu-user-static")
}];

/// Variable of the harness: the number of tests that run at once.
const THREADS: &str = "RUST_TEST_THREADS";

#[derive(Args)]
pub(crate) struct Options {
    /// Run only tests whose name, or whose suite's name, contains this, or SUITE::TEST, without style checks; `lints`: those alone; `image`: those of deploy/ with the image that users load, which is built first
    filter: Option<String>,
}

/// A test program that cargo is about to run: see [`run_test`].
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
        Some(filter) if filter == "image" => of_the_image(&mut stages),
        Some(filter) => matching(&mut stages, filter)?,
    }
    Ok(stages.close())
}

fn everything(stages: &mut Stages) -> Result<()> {
    lints(stages);
    let built = stages.one("build", build_all);
    if !built {
        return Ok(());
    }
    programs::prepare(&CONTAINERS[..1], NO_CONTAINERS);
    programs::prepare(&programs::READERS, programs::NO_READERS);
    programs::prepare(&programs::BROWSER, programs::NO_BROWSER);
    programs::prepare(&programs::RULES, programs::NO_RULES);
    stages.one("unit tests", |tally| tests(tally, &["--lib", "--bins"], &[]));
    stages.one("documentation tests", |tally| tests(tally, &["--doc"], &[]));
    stages.one("packet, model and namespace tests", |tally| tests(tally, &["--test", "*"], &[]));
    stages.one("Linux 6.1 and the newest, emulated", other_kernels);
    Ok(())
}

fn lints(stages: &mut Stages) {
    stages.one("style: cargo fmt", |_| succeeds(cargo::cargo().args(["fmt", "--all", "--check"])));
    // The packet path has a target folder of its own, and `core`, which is compiled for it first, keeps one CPU busy.
    stages.at_once([
        &[("lints: cargo clippy", lint::clippy as Stage), ("documentation: cargo doc", lint::doc)],
        &[
            ("lints of the packet path: cargo clippy for BPF", lint::clippy_bpf),
            ("documentation of the packet path: cargo rustdoc for BPF", lint::doc_bpf),
        ],
    ]);
}

/// The suite of `deploy/`, by the image itself and the container engines of Debian.
fn of_the_image(stages: &mut Stages) {
    programs::prepare(&CONTAINERS, NO_CONTAINERS);
    programs::prepare(&EMULATOR, "the other machine's program is not started");
    let mut archive = PathBuf::new();
    let built = stages.one("image", |_| {
        archive = image::for_both()?;
        Ok(true)
    });
    if built {
        stages.one("tests of deploy, by the image", |tally| {
            tests_with(tally, &["--test", "deploy"], &[], &[("TRAFFIC_POLICY_IMAGE", archive)])
        });
    }
}

fn matching(stages: &mut Stages, filter: &str) -> Result<()> {
    if !stages.one("build", build_all) {
        return Ok(());
    }
    let programs =
        fs::read_dir(cargo::root().join("tests/tests")).context("the tests are not in tests/tests")?;
    let programs = programs.flatten().filter_map(|entry| entry.file_name().into_string().ok());
    let programs: Vec<String> =
        programs.map(|name| name.strip_suffix(".rs").map(str::to_owned).unwrap_or(name)).collect();
    if filter.contains("deploy") || filter.contains("container") {
        programs::prepare(&CONTAINERS[..1], NO_CONTAINERS);
    }
    if filter.contains("deploy") {
        programs::prepare(&programs::READERS, programs::NO_READERS);
    }
    if filter.contains("cni") {
        programs::prepare(&programs::RULES, programs::NO_RULES);
    }
    if filter.contains("page") {
        programs::prepare(&programs::BROWSER, programs::NO_BROWSER);
    }
    // As `cargo xtask vm test` names them.
    if let Some((suite, test)) = filter.split_once("::")
        && programs.iter().any(|name| name == suite)
    {
        stages.one(&format!("tests of {suite} named {test}"), |tally| {
            tests(tally, &["--test", suite], &[test])
        });
    } else {
        for name in programs.iter().filter(|name| name.contains(filter)) {
            stages.one(&format!("tests of {name}"), |tally| tests(tally, &["--test", name], &[]));
        }
        stages.one(&format!("tests named {filter}"), |tally| tests(tally, &["--tests"], &[filter]));
    }
    if stages.tally.passed + stages.tally.failed == 0 {
        bail!("no test or suite has {filter:?} in its name: `ls tests/tests` are the suites");
    }
    Ok(())
}

fn succeeds(command: &mut Command) -> Result<bool> {
    Ok(cargo::status(command)?.success())
}

/// The agent, which tests start as a user would, and all test programs.
fn build_all(_: &mut Tally) -> Result<bool> {
    build::test_programs(None).map(|_| true)
}

/// The oldest and the newest kernel, where machines can be emulated.
fn other_kernels(tally: &mut Tally) -> Result<bool> {
    let kernels = match vm::Smoke::prepare() {
        Ok(kernels) => kernels,
        Err(error) => {
            println!("SKIPPED other kernels: {error:#}");
            tally.skipped += 1;
            return Ok(true);
        }
    };
    kernels.run(tally)
}

/// Runs tests of the whole workspace, always: see [`build::workspace`].
fn tests(tally: &mut Tally, targets: &[&str], arguments: &[&str]) -> Result<bool> {
    tests_with(tally, targets, arguments, &[])
}

/// As [`tests`], with variables in the environment.
fn tests_with(
    tally: &mut Tally,
    targets: &[&str],
    arguments: &[&str],
    variables: &[(&str, PathBuf)],
) -> Result<bool> {
    let own = env::current_exe().context("this program's own path is unknown")?;
    let mut command = cargo::cargo();
    if !cargo::is_root() {
        // The build stays the user's; only test programs that need it run as root.
        let runner = format!("target.'cfg(all())'.runner = ['{}', 'run-test', '--']", own.display());
        command.args(["--config", &runner]);
    }
    command.args(["test", "--workspace", "--no-fail-fast"]).args(targets).arg("--").args(arguments);
    command.env("TRAFFIC_POLICY_AGENT", build::program("traffic-policy-agent", false)?);
    command.envs(variables.iter().map(|(name, value)| (name, value)));
    if env::var_os(THREADS).is_none() {
        command.env(THREADS, threads().to_string());
    }
    tally.run(&mut command)
}

/// Tests of a program that run at once: half as many again as there are CPUs, since most of them wait half of their time, for an
/// agent, an answer or silence. Those that measure loss take turns, and the one that measures speed is alone in its program.
fn threads() -> usize {
    let cpus = thread::available_parallelism().map_or(1, NonZeroUsize::get);
    cpus + cpus / 2
}

/// Runs one test program, as root if it is of a package that needs it. Called by cargo.
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

/// A stage that several threads may run.
type Stage = fn(&mut Tally) -> Result<bool>;

/// The stages so far.
struct Stages {
    started: Instant,
    tally: Tally,
    /// Name, success, time.
    table: Vec<(String, bool, Duration)>,
}

impl Stages {
    /// Runs a stage; whether it succeeded.
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

    /// Runs two rows of stages beside each other.
    fn at_once(&mut self, rows: [&[(&str, Stage)]; 2]) {
        let mut parts =
            rows.map(|_| Self { started: self.started, tally: Tally::default(), table: Vec::new() });
        thread::scope(|scope| {
            for (part, row) in parts.iter_mut().zip(rows) {
                scope.spawn(move || {
                    for (name, stage) in row {
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

    /// The summary; its last line is for programs, too.
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
        println!("{}", self.tally);
        let all = self.table.iter().all(|(_, succeeded, _)| *succeeded) && self.tally.failed == 0;
        if all { ExitCode::SUCCESS } else { ExitCode::FAILURE }
    }
}
