//! `cargo xtask build`, and the programs that other commands start.

use std::{
    env,
    path::PathBuf,
    process::{Command, ExitCode},
};

use anyhow::{Context, Result, bail};
use clap::Args;

use crate::{
    cargo, setup,
    target::{self, Target},
};

#[derive(Args)]
pub(crate) struct Options {
    /// Build the agent without optimisation (the packet path is always optimised)
    #[arg(long)]
    debug: bool,
    /// Build for another machine: aarch64-unknown-linux-gnu or x86_64-unknown-linux-gnu
    #[arg(long, value_name = "TRIPLE", value_parser = target::named)]
    target: Option<&'static Target>,
    /// Build the whole workspace and all test programs instead, without optimisation
    #[arg(long, conflicts_with = "debug")]
    tests: bool,
}

pub(crate) fn run(options: &Options) -> Result<ExitCode> {
    let target = options.target;
    setup::ensure_for(target)?;
    if options.tests {
        test_programs(target)?;
        println!("{}", folder(target, false)?.display());
        return Ok(ExitCode::SUCCESS);
    }
    let mut command = cargo::cargo();
    command.args(["build", "--package", "traffic-policy-agent", "--package", "traffic-policy-lb"]);
    if !options.debug {
        command.arg("--release");
    }
    if let Some(target) = target {
        target.choose(&mut command);
    }
    if !cargo::status(&mut command)?.success() {
        return Ok(ExitCode::FAILURE);
    }
    let folder = folder(target, !options.debug)?;
    for program in ["traffic-policy-agent", "kubectl-traffic_policy"] {
        println!("{}", folder.join(program).display());
    }
    Ok(ExitCode::SUCCESS)
}

/// Builds the whole workspace and its integration tests into [`folder`], for a target that
/// [`setup::ensure_for`] has prepared, or without one for this machine. The build is not optimised,
/// as with `cargo test`. Returns the test programs by their names.
pub(crate) fn test_programs(target: Option<&Target>) -> Result<Vec<(String, PathBuf)>> {
    let name = target.map_or("this machine", |target| target.triple);
    let (mut programs, mut tests) = (with_tests(), cargo::cargo());
    tests.args(["test", "--workspace", "--no-run"]);
    for command in [&mut programs, &mut tests] {
        if let Some(target) = target {
            target.choose(command);
        }
    }
    if !cargo::status(programs.arg("--quiet"))?.success() {
        bail!("the build for {name} failed");
    }
    let output = tests.output().context("cargo cannot be started")?;
    let said = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        bail!("the build of the tests for {name} failed:\n{said}");
    }
    Ok(executables(&said).map(|(name, path)| (name.to_owned(), cargo::root().join(path))).collect())
}

/// Returns the integration tests in the output of `cargo test --no-run`: `Executable
/// tests/policy/main.rs (target/debug/deps/policy-0123)`.
fn executables(said: &str) -> impl Iterator<Item = (&str, &str)> {
    said.lines().filter_map(|line| {
        let (source, path) = line.trim().strip_prefix("Executable ")?.split_once(" (")?;
        let name = source.strip_prefix("tests/")?.trim_end_matches("/main.rs").trim_end_matches(".rs");
        Some((name, path.strip_suffix(')')?))
    })
}

/// Returns the folder of cargo's output for a target; test programs are in `deps` below it.
pub(crate) fn folder(target: Option<&Target>, release: bool) -> Result<PathBuf> {
    let mut folder = target_folder()?;
    if let Some(target) = target.filter(|target| !target.is_host()) {
        folder.push(target.triple);
    }
    folder.push(if release { "release" } else { "debug" });
    Ok(folder)
}

/// Builds the workspace, and returns the path of one of its programs. The agent, which the program
/// may start, is in the same folder.
pub(crate) fn program_beside_agent(name: &str) -> Result<PathBuf> {
    if !cargo::status(workspace().arg("--quiet"))?.success() {
        bail!("the build failed");
    }
    let built = program(name, false)?;
    if !built.exists() {
        bail!("the workspace has no program {name}");
    }
    Ok(built)
}

/// Builds the agent as it is released.
pub(crate) fn optimised_agent() -> Result<()> {
    let mut command = cargo::cargo();
    command.args(["build", "--quiet", "--release", "--package", "traffic-policy-agent"]);
    if !cargo::status(&mut command)?.success() {
        bail!("the build failed");
    }
    Ok(())
}

/// Returns a command for the whole workspace: a selection of packages would also select features of
/// their dependencies, and each such selection is compiled separately.
pub(crate) fn workspace() -> Command {
    let mut command = cargo::cargo();
    command.args(["build", "--workspace"]);
    command
}

/// Returns a command for the whole workspace and its tests. They are built by one command, since
/// dependencies have more features with those that tests need, and what uses them would be compiled
/// for either selection.
pub(crate) fn with_tests() -> Command {
    let mut command = workspace();
    command.args(["--lib", "--bins", "--tests"]);
    command
}

/// Returns the path of a program that cargo has built for this machine.
pub(crate) fn program(name: &str, release: bool) -> Result<PathBuf> {
    Ok(folder(None, release)?.join(name))
}

/// Returns cargo's target folder, which contains this program.
pub(crate) fn target_folder() -> Result<PathBuf> {
    let own = env::current_exe().context("this program's own path is unknown")?;
    Ok(own.ancestors().nth(2).context("this program is not in a target folder")?.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integration_tests_by_name() {
        let said = "   Compiling a v0.1.0\n  Executable unittests src/lib.rs (target/debug/deps/a-1)\n  Executable tests/policy/main.rs (target/debug/deps/policy-2)\n  Executable tests/budgets.rs (target/debug/deps/budgets-3)\n";
        let found: Vec<_> = executables(said).collect();
        assert_eq!(
            found,
            [("policy", "target/debug/deps/policy-2"), ("budgets", "target/debug/deps/budgets-3")]
        );
    }
}
