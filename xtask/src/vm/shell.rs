//! `cargo xtask vm shell`: a machine with a shell on its console.

use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Args;

use super::{Choice, job, machine::Machine, series::Wanted};
use crate::{cargo, files};

#[derive(Args)]
pub(super) struct Options {
    #[command(flatten)]
    choice: Choice,
    /// Command to run instead of a shell
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    command: Vec<String>,
}

pub(super) fn run(options: &Options) -> Result<ExitCode> {
    let workshop = options.choice.workshop(&[Wanted::Newest])?;
    let (root, built) = workshop.root_with_all()?;
    let kernel = workshop.kernels.first().context("no kernel was named")?;
    let mut job = job::environment(&built);
    job += "export PATH=\"$(dirname \"$TRAFFIC_POLICY_AGENT\"):$PATH\"\n";
    if options.command.is_empty() {
        println!(
            "vm: Linux {} boots in some seconds; `exit` ends the machine, and so does Ctrl-A X",
            kernel.release
        );
        // A shell with job control needs a terminal of its own session.
        job += &format!("setsid --ctty --wait bash -i </dev/{0} >/dev/{0} 2>&1\n", workshop.arch.console());
    } else {
        let words: Vec<_> = options.command.iter().map(|word| job::quoted(word)).collect();
        job += &format!("{}\n", words.join(" "));
    }
    let machine = Machine::new(&workshop, kernel, &root, job, "shell");
    let mut command = machine.command()?;
    // Keys such as Ctrl-C are passed to the machine.
    command.args(["-chardev", "stdio,id=console,mux=on,signal=off", "-serial", "chardev:console"]);
    let code = cargo::exit_code(&mut command);
    files::remove(&machine.folder)?;
    code
}
