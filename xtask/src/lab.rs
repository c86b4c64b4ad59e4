//! `cargo xtask lab`, `demo` and `fuzz`: programs of the packages `lab` and `fuzz`, which parse
//! their own arguments.

use std::{ffi::OsString, process::ExitCode};

use anyhow::Result;
use clap::Args;

use crate::{build, cargo, setup};

#[derive(Args)]
pub(crate) struct Options {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, hide = true)]
    arguments: Vec<OsString>,
}

pub(crate) fn run(program: &str, options: &Options) -> Result<ExitCode> {
    setup::ensure()?;
    if program == "demo" {
        setup::programs::prepare(&setup::programs::RULES, "the scene with kube-proxy's rules fails");
    }
    let built = build::program_beside_agent(program)?;
    let Some(mut command) = cargo::privileged(built) else {
        anyhow::bail!("network namespaces need root: run this as root, or install sudo");
    };
    cargo::exit_code(command.args(&options.arguments))
}
