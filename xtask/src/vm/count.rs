//! `cargo xtask vm count`: the number of instructions for one packet, measured on a machine whose
//! clock advances by a nanosecond with each.

use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use clap::Args;

use super::{
    Built, Choice,
    job::{self, Mark, Run},
    machine::{Clock, Machine},
    series::Wanted,
};
use crate::files;

/// A row or more of each part, with tables that an emulated processor fills quickly.
const DEFAULT: [&str; 5] = [
    "tables from empty to a quarter full",
    "request, IPv4 TCP, XDP, 1k flows",
    "request, IPv6 TCP, XDP, 1k flows",
    "request, IPv4 TCP, TC, 1k flows",
    "request, IPv6 TCP, TC, 1k flows",
];

#[derive(Args)]
pub(super) struct Options {
    #[command(flatten)]
    choice: Choice,
    /// Rows of `cargo xtask bench --list` that are about one packet, by words of their group and
    /// name [default: new flows in empty tables, and requests of 1k open ones]
    #[arg(value_name = "NAME")]
    names: Vec<String>,
}

pub(super) fn run(options: &Options) -> Result<ExitCode> {
    let workshop = options.choice.workshop(&[Wanted::Newest])?;
    let built = Built::all(workshop.arch)?;
    let root = workshop.root(&built, [built.program("bench")])?;
    let kernel = workshop.kernels.first().context("no kernel was named")?;
    let mut arguments: Vec<_> = ["--instructions", "--output", "/run/bench"].map(str::to_owned).into();
    match options.names.as_slice() {
        [] => arguments.extend(DEFAULT.map(str::to_owned)),
        names => arguments.extend_from_slice(names),
    }
    let run = Run { name: "bench".to_owned(), program: built.program("bench"), arguments, selected: None };
    let job = job::script(&built, &[run]);
    let machine = Machine {
        // A second one would only wait.
        processors: 1,
        clock: Clock::Instructions,
        ..Machine::new(&workshop, kernel, &root, job, "count")
    };
    println!("vm: counting on Linux {}, some minutes …", kernel.release);
    let mut code = None;
    machine.run(|line| match job::mark(line) {
        // The file of the report is lost with the machine.
        Mark::Begin(_) | Mark::Output("/run/bench/report.html") => {}
        Mark::End(number) => code = Some(number),
        Mark::Output(text) => println!("{text}"),
    })?;
    files::remove(&machine.folder)?;
    match code {
        Some(0) => Ok(ExitCode::SUCCESS),
        Some(_) => Ok(ExitCode::FAILURE),
        None => bail!("the bench was not started"),
    }
}
