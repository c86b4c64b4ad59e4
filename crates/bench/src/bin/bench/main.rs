//! `cargo xtask bench`: the cost of the packet path, compared with a bare floor and with other
//! forwarders in the same run.
//!
//! Everything happens in network namespaces of its own; no device of the machine is touched.

mod fleet;
mod packet;
mod report;
mod scale;
mod selection;
mod wire;

use std::{path::PathBuf, process::ExitCode, time::Duration};

use anyhow::Result;
use clap::Parser;
use traffic_policy_cluster::model::parse_duration;

use self::{report::Report, selection::Selection};

/// Measures the packet path, bare floors and other forwarders: about ten minutes for everything
/// except one-shot
///
/// The result is a folder with results.json (every run of every row, and the conditions of the
/// figures) and report.html (plots and tables in one file); a table is printed. A row whose runs
/// differ by more than its bound is measured once more, then marked as noisy.
#[derive(Parser)]
#[command(name = "bench", bin_name = "cargo xtask bench")]
struct Cli {
    /// Rows to measure, by words of their group and name: `established`, `established/ipv6-udp`,
    /// `wire/nftables` [default: everything]
    #[arg(value_name = "NAME")]
    names: Vec<String>,
    /// More runs, larger tables, every combination: up to thirty minutes
    #[arg(long)]
    full: bool,
    /// Only list the existing groups and rows; with --full, all of them
    #[arg(long)]
    list: bool,
    /// Folder of the result [default: target/bench/<time>-<commit>]
    #[arg(long, value_name = "DIR")]
    #[allow(rustdoc::invalid_html_tags, reason = "`--help` shows it as it stands")]
    output: Option<PathBuf>,
    /// Length of the group `one-shot`, which only runs by its name: `90s`, `5m`
    #[arg(long = "for", default_value = "5m", value_parser = length, value_name = "DURATION")]
    questions: Duration,
    /// Print the JSON of the result instead of the table
    #[arg(long)]
    json: bool,
    /// Seed of random choices
    #[arg(long, default_value_t = 0x7470, value_name = "NUMBER")]
    seed: u64,
    /// One short run of each row, counted in instructions: for a machine whose clock advances by a
    /// nanosecond with each of them, as `cargo xtask vm count` starts it
    #[arg(long, conflicts_with = "full")]
    instructions: bool,
    /// Measure nothing: show what changed from one result to another (folders, or the JSON in them)
    #[arg(long, num_args = 2, value_names = ["A", "B"], conflicts_with_all = ["names", "full", "list", "output", "json", "instructions"])]
    compare: Option<Vec<PathBuf>>,
}

/// Extent of the measurement.
#[derive(Clone, Copy)]
pub(crate) struct Effort {
    /// Number of runs of each program; programs take turns.
    pub(crate) rounds: usize,
    /// Minimum number of packets of one run.
    pub(crate) packets: u32,
    /// Whether `--full` is given: large tables, and every combination.
    pub(crate) full: bool,
    /// Whether `--instructions` is given: each run is like any other.
    pub(crate) counted: bool,
    /// Length of the group of one-shot questions.
    pub(crate) questions: Duration,
}

fn length(text: &str) -> Result<Duration, String> {
    parse_duration(text).ok_or_else(|| format!("{text} is no duration: 90s, 5m"))
}

impl Effort {
    const QUESTIONS: Duration = Duration::ZERO;
    const QUICK: Self =
        Self { rounds: 8, packets: 200_000, full: false, counted: false, questions: Self::QUESTIONS };
    const FULL: Self =
        Self { rounds: 12, packets: 500_000, full: true, counted: false, questions: Self::QUESTIONS };
    const COUNTED: Self =
        Self { rounds: 1, packets: 4096, full: false, counted: true, questions: Self::QUESTIONS };
}

type Part = fn(Effort, &mut Report) -> Result<()>;

/// All parts of the bench; each part queries the report which of its rows are wanted.
const PARTS: &[(&str, Part)] = &[
    ("per packet", packet::measure),
    ("on the wire", wire::measure),
    ("to pods", wire::pods::measure),
    ("scale", scale::measure),
    ("fleet", fleet::measure),
    ("one-shot questions", wire::one_shot::measure),
];

fn main() -> ExitCode {
    match run(&Cli::parse()) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("Error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(cli: &Cli) -> Result<ExitCode> {
    if let Some([before, after]) = cli.compare.as_deref() {
        print!("{}", report::compare(&Report::read(before)?, &Report::read(after)?));
        return Ok(ExitCode::SUCCESS);
    }
    let effort = match (cli.full, cli.instructions) {
        (true, _) => Effort::FULL,
        (_, true) => Effort::COUNTED,
        _ => Effort::QUICK,
    };
    let effort = Effort { questions: cli.questions, ..effort };
    let mut offered = Report::listing();
    for (_, measure) in PARTS {
        measure(effort, &mut offered)?;
    }
    let mut selection = Selection::of(&cli.names, offered.selection())?;
    if cli.list {
        for (group, name) in offered.selection().offered() {
            if selection.wants(group, name) {
                println!("{group}: {name}");
            }
        }
        return Ok(ExitCode::SUCCESS);
    }
    let mut report = Report::begin(selection, cli.seed, effort);
    let mut code = ExitCode::SUCCESS;
    for (name, measure) in PARTS {
        if let Err(error) = measure(effort, &mut report) {
            // Rows that were measured before the error, and those of the other parts, are worth
            // keeping.
            report.warn(format!("{name}: {error:#}"));
            code = ExitCode::FAILURE;
        }
    }
    report.end();
    let folder = cli.output.clone().map_or_else(|| report.default_folder(), Ok)?;
    report.write(&folder)?;
    if cli.json {
        println!("{:#}", serde_json::json!(report));
    } else {
        print!("{report}");
    }
    eprintln!("{}", folder.join("report.html").display());
    let unmeasured = report.unmeasured();
    if !unmeasured.is_empty() {
        eprintln!("Error: {} rows were not measured:", unmeasured.len());
        unmeasured.iter().for_each(|row| eprintln!("  {row}"));
        code = ExitCode::FAILURE;
    }
    Ok(code)
}
