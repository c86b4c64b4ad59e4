//! `cargo xtask bench`: nanoseconds per packet of the packet path, beside those of a bare floor in the same run.
//!
//! Everything happens in network namespaces of its own; no device of the machine is touched.

mod established;
mod flows;
mod foreign;
mod frame;
mod fresh;
mod loaded;
mod report;
mod stand;

use std::process::ExitCode;

use anyhow::Result;
use clap::Parser;

use self::{report::Report, stand::Stand};

#[derive(Parser)]
#[command(name = "cargo xtask bench")]
struct Cli {
    /// Fewer runs, and no large tables
    #[arg(long)]
    quick: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// How much is measured.
#[derive(Clone, Copy)]
pub(crate) struct Effort {
    /// Runs of each program; they take turns.
    pub(crate) rounds: usize,
    /// Packets of one run, at least.
    pub(crate) packets: u32,
    pub(crate) large: bool,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    match run(&cli) {
        Ok(report) => {
            if cli.json {
                println!("{:#}", report.json());
            } else {
                print!("{report}");
            }
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("Error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(cli: &Cli) -> Result<Report> {
    let effort = if cli.quick {
        Effort { rounds: 8, packets: 200_000, large: false }
    } else {
        Effort { rounds: 16, packets: 500_000, large: true }
    };
    let stand = Stand::build()?;
    let mut report = Report::default();
    stand.run(|| {
        established::measure(&stand, effort, &mut report)?;
        foreign::measure(&stand, effort, &mut report)?;
        fresh::measure(&stand, effort, &mut report)
    })?;
    Ok(report)
}
