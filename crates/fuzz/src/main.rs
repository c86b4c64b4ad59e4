//! `cargo xtask fuzz`: random packets through the programs and the reference model, for as long as
//! wanted.

use std::{
    process::ExitCode,
    time::{Duration, Instant},
};

use anyhow::Result;
use clap::Parser;
use fastrand::Rng;
use traffic_policy_fuzz::{Path, Totals, concurrent, fuzz, row, shrink};
use traffic_policy_testing::harness;

#[derive(Parser)]
#[command(name = "cargo xtask fuzz", about = "Random packets through the programs, beside a reference model")]
struct Options {
    /// Total time, such as 30s or 10m; each of XDP and TC, IPv4 and IPv6, gets a quarter
    #[arg(long = "for", default_value = "1m", value_name = "TIME", value_parser = duration)]
    time: Duration,
    /// Seed of the random numbers; by default the time, which is printed
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Sleep at random moments, as on a busy machine: finds what depends on real time, in far fewer
    /// packets
    #[arg(long)]
    pauses: bool,
}

/// Divisor of a path's time that gives the share of runs on two CPUs at once.
const BOTH: u32 = 6;

fn duration(text: &str) -> Result<Duration, String> {
    let (number, unit) = text.split_at(text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len()));
    let number: u64 = number.parse().map_err(|_| format!("{text}: not a time such as 30s, 10m or 2h"))?;
    match unit {
        "s" => Ok(Duration::from_secs(number)),
        "m" => Ok(Duration::from_secs(number * 60)),
        "h" => Ok(Duration::from_secs(number * 3600)),
        _ => Err(format!("{text}: not a time such as 30s, 10m or 2h")),
    }
}

fn main() -> Result<ExitCode> {
    let options = Options::parse();
    let seed = options.seed.unwrap_or_else(|| Rng::new().u64(..));
    println!("seed {seed}");
    let mut sum = Totals::default();
    let paths: Vec<_> = Path::all().collect();
    for path in &paths {
        let mut rng = Rng::with_seed(seed);
        let mut totals = Totals::default();
        let each = options.time / paths.len() as u32;
        let both = each / BOTH;
        let differs = harness::with(|harness| {
            // The programs are loaded by now.
            let (started, mut said) = (Instant::now(), Instant::now());
            let ran = fuzz(harness, *path, &mut rng, &mut totals, options.pauses, |totals| {
                if said.elapsed() > Duration::from_secs(10) {
                    println!("{path:?}: {} packets", totals.packets);
                    said = Instant::now();
                }
                started.elapsed() >= each - both
            });
            if let Err(found) = ran {
                let (actions, difference) = *found;
                println!("{path:?}: they differ; shrinking {} actions", difference.at + 1);
                let (actions, difference) = shrink(harness, *path, &actions, &difference);
                return Some(row::describe(*path, &actions, &difference));
            }
            let alone = totals.packets;
            match concurrent::fuzz(harness, *path, &mut rng, &mut totals, |_| started.elapsed() >= each) {
                Ok(true) => {
                    println!("{path:?}: {} packets on two CPUs at once", totals.packets - alone);
                    None
                }
                Ok(false) => None,
                Err(what) => Some(format!("{path:?}, two CPUs at once: {what}")),
            }
        });
        if let Some(text) = differs {
            println!("{text}");
            eprintln!("Error: program and model differ: --seed {seed} repeats it");
            return Ok(ExitCode::FAILURE);
        }
        println!(
            "{path:?}: {} packets, {} translated, {} new flows ({} associations, {} restarted), {} left as \
             they were; no difference",
            totals.packets,
            totals.translated,
            totals.flows,
            totals.associations,
            totals.restarts,
            totals.unchanged
        );
        sum.packets += totals.packets;
    }
    println!("{} packets, no difference, seed {seed}", sum.packets);
    Ok(ExitCode::SUCCESS)
}
