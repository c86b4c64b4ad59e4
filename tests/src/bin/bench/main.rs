//! `cargo xtask bench`: what the packet path costs, beside a bare floor and what others do in the same run.
//!
//! Everything happens in network namespaces of its own; no device of the machine is touched.

mod packet;
mod report;
mod selection;
mod wire;

use std::process::ExitCode;

use anyhow::Result;
use clap::Parser;

use self::{report::Report, selection::Selection};

/// Measures the packet path: about five minutes for everything
#[derive(Parser)]
#[command(name = "cargo xtask bench")]
struct Cli {
    /// What to measure: words of groups and rows, as `established`, `established/ipv6-udp`, `wire/nftables` [default: all]
    #[arg(value_name = "NAME")]
    names: Vec<String>,
    /// More runs, larger tables, more combinations: up to thirty minutes
    #[arg(long)]
    full: bool,
    /// Only name the groups and rows that there are
    #[arg(long)]
    list: bool,
    /// What random choices start from
    #[arg(long, default_value_t = 0x7470, value_name = "NUMBER")]
    seed: u64,
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
    /// `--full`: large tables, and every combination.
    pub(crate) full: bool,
}

impl Effort {
    const QUICK: Self = Self { rounds: 8, packets: 200_000, full: false };
    const FULL: Self = Self { rounds: 16, packets: 500_000, full: true };
}

fn main() -> ExitCode {
    match run(&Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("Error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Everything that is measured; each part asks the report which of its rows are wanted.
fn measure(effort: Effort, report: &mut Report) -> Result<()> {
    packet::measure(effort, report)?;
    wire::measure(effort, report)
}

fn run(cli: &Cli) -> Result<()> {
    let effort = if cli.full { Effort::FULL } else { Effort::QUICK };
    let mut offered = Report::listing();
    measure(effort, &mut offered)?;
    if cli.list {
        for (group, name) in offered.selection().offered() {
            println!("{group}: {name}");
        }
        return Ok(());
    }
    let mut report = Report::new(Selection::of(&cli.names, offered.selection())?, cli.seed);
    measure(effort, &mut report)?;
    if cli.json {
        println!("{:#}", serde_json::json!(report));
    } else {
        print!("{report}");
    }
    Ok(())
}
