//! `cargo xtask build`, and the programs that other commands start.

use std::{
    env,
    path::PathBuf,
    process::{Command, ExitCode},
};

use anyhow::{Context, Result, bail};
use clap::Args;

use crate::{cargo, setup};

#[derive(Args)]
pub(crate) struct Options {
    /// Without optimisation of the agent (the packet path is always optimised)
    #[arg(long)]
    debug: bool,
}

pub(crate) fn run(options: &Options) -> Result<ExitCode> {
    setup::ensure()?;
    let mut command = cargo::cargo();
    command.args(["build", "--package", "traffic-policy-agent"]);
    if !options.debug {
        command.arg("--release");
    }
    if !cargo::status(&mut command)?.success() {
        return Ok(ExitCode::FAILURE);
    }
    println!("{}", program("traffic-policy-agent", !options.debug)?.display());
    Ok(ExitCode::SUCCESS)
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

/// Where cargo leaves a program: beside this one, or in the folder of the other profile.
pub(crate) fn program(name: &str, release: bool) -> Result<PathBuf> {
    let own = env::current_exe().context("this program's own path is unknown")?;
    let target = own.ancestors().nth(2).context("this program is not in a target folder")?;
    Ok(target.join(if release { "release" } else { "debug" }).join(name))
}
