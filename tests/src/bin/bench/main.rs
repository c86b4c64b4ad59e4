//! `cargo xtask bench`: what the packet path costs, beside a bare floor and what others do in the same run.
//!
//! Everything happens in network namespaces of its own; no device of the machine is touched.

mod packet;
mod report;
mod wire;

use std::process::ExitCode;

use anyhow::Result;
use clap::Parser;

use self::report::Report;

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
                println!("{:#}", serde_json::json!(report));
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
    let mut report = Report::default();
    if std::env::var_os("ONLY_WIRE").is_none() {
        packet::measure(effort, &mut report)?;
    }
    wire::measure(effort, &mut report)?;
    Ok(report)
}
