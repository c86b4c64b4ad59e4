//! `cargo xtask bench`.

use std::process::ExitCode;

use anyhow::Result;
use clap::{Args, ValueEnum};

use crate::{build, cargo, setup};

#[derive(Args)]
pub(crate) struct Options {
    /// Fewer runs and no large tables: seconds instead of a minute
    #[arg(long)]
    quick: bool,
    /// How the figures are printed
    #[arg(long, value_enum, default_value_t = Output::Table)]
    output: Output,
}

#[derive(Clone, Copy, ValueEnum)]
enum Output {
    Table,
    Json,
}

pub(crate) fn run(options: &Options) -> Result<ExitCode> {
    setup::ensure()?;
    // Not optimised itself: what is measured runs in the kernel and always is, and so nothing is compiled a second time.
    let built = build::tests_program("bench")?;
    let Some(mut command) = cargo::privileged(built) else {
        anyhow::bail!("loading programs needs root: run this as root, or install sudo");
    };
    if options.quick {
        command.arg("--quick");
    }
    if matches!(options.output, Output::Json) {
        command.arg("--json");
    }
    cargo::exit_code(&mut command)
}
