//! `cargo xtask setup`: finds or installs everything that building and testing need.

mod apt;
mod facts;
mod plan;
pub(crate) mod programs;
mod step;

use std::{
    process::ExitCode,
    time::{Duration, Instant},
};

use anyhow::{Result, bail};
use clap::Args;

use self::{
    facts::Facts,
    plan::{Next, next},
    step::Step,
};
use crate::target::{self, Target};

#[derive(Args)]
pub(crate) struct Options {
    /// Only report what is missing; exit code 1 if anything is
    #[arg(long)]
    check: bool,
    /// Include what building for this target needs
    #[arg(long, value_name = "TRIPLE", value_parser = target::named)]
    target: Option<&'static Target>,
}

pub(crate) fn run(options: &Options) -> Result<ExitCode> {
    let started = Instant::now();
    if options.check {
        let facts = Facts::gather(&Facts::default(), options.target);
        print!("{facts}");
        return Ok(match next(&facts) {
            Next::Done => ExitCode::SUCCESS,
            Next::Step(step) => {
                println!("Next step of `cargo xtask setup`: {step}");
                ExitCode::FAILURE
            }
            Next::Impossible(why) => {
                println!("{why}");
                ExitCode::FAILURE
            }
        });
    }
    let facts = prepare(options.target)?;
    // Tests run without it, and report that.
    programs::prepare(&programs::BROWSER, programs::NO_BROWSER);
    print!("{facts}");
    println!("Ready ({:.1} s).", started.elapsed().as_secs_f32());
    Ok(ExitCode::SUCCESS)
}

/// Does the same as `cargo xtask setup`, but silently if nothing is missing.
pub(crate) fn ensure() -> Result<()> {
    prepare(None).map(|_| ())
}

/// Does the same as [`ensure`], including what building for this target needs, if there is one.
pub(crate) fn ensure_for(target: Option<&'static Target>) -> Result<()> {
    prepare(target).map(|_| ())
}

/// Executes one step at a time: each step changes the known facts, and a step that did not achieve
/// its purpose is not repeated.
fn prepare(target: Option<&'static Target>) -> Result<Facts> {
    let mut facts = Facts::gather(&Facts::default(), target);
    loop {
        match next(&facts) {
            Next::Done => break,
            Next::Impossible(why) => bail!("{why}"),
            Next::Step(step) => {
                let started = Instant::now();
                println!("setup: {step} …");
                match step::carry_out(&step) {
                    Ok(()) => println!("setup: done{}", duration(started.elapsed())),
                    Err(error) => println!("setup: that failed: {error:#}"),
                }
                facts.tried.push(step);
                facts = Facts::gather(&facts, target);
            }
        }
    }
    if facts.tried.iter().any(Step::concerns_bpf) {
        // The build script of the agent does not check again by itself.
        step::forget_builds();
    }
    Ok(facts)
}

fn duration(took: Duration) -> String {
    if took < Duration::from_secs(2) { String::new() } else { format!(" ({} s)", took.as_secs()) }
}
