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
    /// Without optimisation of the agent (the packet path is always optimised)
    #[arg(long)]
    debug: bool,
    /// For another machine: aarch64-unknown-linux-gnu or x86_64-unknown-linux-gnu
    #[arg(long, value_name = "TRIPLE", value_parser = target::named)]
    target: Option<&'static Target>,
    /// The whole workspace and all test programs instead, without optimisation
    #[arg(long, conflicts_with = "debug")]
    tests: bool,
}

pub(crate) fn run(options: &Options) -> Result<ExitCode> {
    let target = options.target;
    setup::ensure_for(target)?;
    if options.tests {
        for_target(target)?;
        println!("{}", folder(target, false)?.display());
        return Ok(ExitCode::SUCCESS);
    }
    let mut command = cargo::cargo();
    command.args(["build", "--package", "traffic-policy-agent"]);
    if !options.debug {
        command.arg("--release");
    }
    if let Some(target) = target {
        target.choose(&mut command);
    }
    if !cargo::status(&mut command)?.success() {
        return Ok(ExitCode::FAILURE);
    }
    println!("{}", folder(target, !options.debug)?.join("traffic-policy-agent").display());
    Ok(ExitCode::SUCCESS)
}

/// Builds the whole workspace and all test programs for a target, which [`setup::ensure_for`] has seen to, into
/// [`folder`]; for this machine without one. Not optimised, as `cargo test` does.
pub(crate) fn for_target(target: Option<&Target>) -> Result<()> {
    let mut tests = cargo::cargo();
    tests.args(["test", "--workspace", "--no-run"]);
    for mut command in [workspace(), tests] {
        if let Some(target) = target {
            target.choose(&mut command);
        }
        if !cargo::status(command.arg("--quiet"))?.success() {
            bail!("the build for {} failed", target.map_or("this machine", |target| target.triple));
        }
    }
    Ok(())
}

/// Where cargo leaves what it builds for a target; test programs are in `deps` below it.
pub(crate) fn folder(target: Option<&Target>, release: bool) -> Result<PathBuf> {
    let own = env::current_exe().context("this program's own path is unknown")?;
    let mut folder = own.ancestors().nth(2).context("this program is not in a target folder")?.to_owned();
    if let Some(target) = target.filter(|target| !target.is_host()) {
        folder.push(target.triple);
    }
    folder.push(if release { "release" } else { "debug" });
    Ok(folder)
}

/// Builds a program of the tests package, and the agent that it may start.
pub(crate) fn tests_program(name: &str) -> Result<PathBuf> {
    if !cargo::status(workspace().arg("--quiet"))?.success() {
        bail!("the build failed");
    }
    let built = program(name, false)?;
    if !built.exists() {
        bail!("there is no program {name} in the tests package");
    }
    Ok(built)
}

/// Builds the agent as users have it.
pub(crate) fn optimised_agent() -> Result<()> {
    let mut command = cargo::cargo();
    command.args(["build", "--quiet", "--release", "--package", "traffic-policy-agent"]);
    if !cargo::status(&mut command)?.success() {
        bail!("the build failed");
    }
    Ok(())
}

/// The whole workspace, always: a choice of packages would choose features of their dependencies too, and each such choice
/// is compiled anew.
pub(crate) fn workspace() -> Command {
    let mut command = cargo::cargo();
    command.args(["build", "--workspace"]);
    command
}

/// Where cargo leaves a program of this machine.
pub(crate) fn program(name: &str, release: bool) -> Result<PathBuf> {
    Ok(folder(None, release)?.join(name))
}
