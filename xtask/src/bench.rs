//! `cargo xtask bench`: a program of the tests package, which parses its arguments itself.

use std::{ffi::OsString, process::ExitCode};

use anyhow::Result;
use clap::Args;

use crate::{build, cargo, setup};

#[derive(Args)]
pub(crate) struct Options {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, hide = true)]
    arguments: Vec<OsString>,
}

/// Arguments with which nothing is loaded.
const HARMLESS: [&str; 4] = ["--help", "-h", "--list", "--compare"];

pub(crate) fn run(options: &Options) -> Result<ExitCode> {
    setup::ensure()?;
    // Not optimised itself: what is measured runs in the kernel and always is, and so nothing is compiled a second time.
    let built = build::tests_program("bench")?;
    let harmless = options.arguments.iter().any(|argument| HARMLESS.iter().any(|known| argument == known));
    if !harmless {
        setup::rules::prepare();
    }
    let command = if harmless { Some(std::process::Command::new(&built)) } else { cargo::privileged(&built) };
    let Some(mut command) = command else {
        anyhow::bail!("loading programs needs root: run this as root, or install sudo");
    };
    cargo::exit_code(command.args(&options.arguments))
}
