//! `cargo xtask bench`: the program of the package `bench`, which parses its arguments itself.

use std::{
    ffi::OsString,
    path::Path,
    process::{Command, ExitCode},
};

use anyhow::{Context, Result};
use clap::Args;

use crate::{build, cargo, setup};

#[derive(Args)]
pub(crate) struct Options {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, hide = true)]
    arguments: Vec<OsString>,
}

/// Arguments that load no programs.
const HARMLESS: [&str; 4] = ["--help", "-h", "--list", "--compare"];

/// The prefix of the names of groups whose rows need the agent.
const AGENT_GROUPS: &str = "scale";
/// The prefixes of the names of groups that compare with netfilter rules.
const WIRE_GROUPS: [&str; 3] = ["wire", "local delivery", "one-shot"];

pub(crate) fn run(options: &Options) -> Result<ExitCode> {
    setup::ensure()?;
    // The bench itself is not optimised: the measured programs run in the kernel and are always
    // optimised, and this way nothing is compiled a second time.
    let built = build::program_beside_agent("bench")?;
    let command = if is_harmless(&options.arguments) {
        Some(Command::new(&built))
    } else {
        let wanted = wanted(&built, &options.arguments)?;
        let wants = |groups: &str| wanted.lines().any(|row| row.starts_with(groups));
        if wants(AGENT_GROUPS) {
            println!(
                "building the optimised agent, whose own speed is measured too (some minutes the first time)"
            );
            build::optimised_agent()?;
        }
        if WIRE_GROUPS.into_iter().any(wants) {
            setup::programs::prepare(&setup::programs::RULES, "kube-proxy's rules are not all measured");
        }
        cargo::privileged(&built)
    };
    let Some(mut command) = command else {
        anyhow::bail!("loading programs needs root: run this as root, or install sudo");
    };
    cargo::exit_code(command.args(&options.arguments))
}

/// Returns the selected rows, a line each; none if the arguments are wrong, which the bench itself
/// will report.
fn wanted(bench: &Path, arguments: &[OsString]) -> Result<String> {
    let listed =
        Command::new(bench).arg("--list").args(arguments).output().context("starting the bench failed")?;
    Ok(String::from_utf8_lossy(&listed.stdout).into_owned())
}

fn is_harmless(arguments: &[OsString]) -> bool {
    arguments.iter().any(|argument| HARMLESS.iter().any(|known| argument == known))
}
