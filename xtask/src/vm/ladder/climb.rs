//! One rung of the ladder: a machine with one kernel executes all programs, and its console is
//! followed.

use std::{
    thread,
    time::{Duration, Instant},
};

use anyhow::Result;

use super::{
    super::{
        Built, Workshop,
        job::{self, Mark, Run},
        kernel::Kernel,
        machine::Machine,
        records::Recorder,
        root::Root,
        series::Series,
        wires::{self, Wires},
    },
    selection::DRIVERS,
};
use crate::tally::Tally;

/// The inputs for each kernel.
#[derive(Clone, Copy)]
pub(super) struct Climb<'a> {
    pub(super) workshop: &'a Workshop,
    pub(super) root: &'a Root,
    pub(super) built: &'a Built,
    pub(super) runs: &'a [Run],
    /// The number of processors of each machine.
    pub(super) processors: u32,
}

/// The outcome of each suite, in the order in which they ran.
type Results = Vec<(String, Outcome)>;

/// The results of one kernel.
pub(super) struct Rung {
    pub(super) kernel: String,
    pub(super) results: Results,
    pub(super) took: Duration,
}

pub(super) struct Outcome {
    pub(super) tally: Tally,
    pub(super) took: Duration,
}

impl Outcome {
    pub(super) fn cell(&self) -> String {
        let Tally { passed, failed, skipped, left_out, .. } = &self.tally;
        let mut text = format!("{passed} of {}", passed + failed);
        if *failed > 0 {
            text = format!("**{text}**");
        }
        if *skipped > 0 {
            text += &format!(", {skipped} skipped");
        }
        if *left_out > 0 {
            text += &format!(", {left_out} not run");
        }
        format!("{text} ({:.0} s)", self.took.as_secs_f32())
    }
}

impl Climb<'_> {
    /// Runs one machine after the other; calls `so_far` after each.
    pub(super) fn in_turn(&self, mut so_far: impl FnMut(&[Rung])) -> Vec<Rung> {
        let mut rungs = Vec::new();
        for kernel in &self.workshop.kernels {
            rungs.push(self.rung(kernel));
            so_far(&rungs);
        }
        rungs
    }

    /// Runs all machines at the same time.
    pub(super) fn side_by_side(&self) -> Vec<Rung> {
        thread::scope(|scope| {
            let kernels = self.workshop.kernels.iter();
            let running: Vec<_> = kernels.map(|kernel| scope.spawn(|| self.rung(kernel))).collect();
            let ended = running.into_iter().map(|rung| match rung.join() {
                Ok(rung) => rung,
                Err(panic) => std::panic::resume_unwind(panic),
            });
            ended.collect()
        })
    }

    /// Boots one kernel and executes all programs there.
    fn rung(&self, kernel: &Kernel) -> Rung {
        let started = Instant::now();
        println!("\n=== Linux {} ({}): booting", kernel.release, self.workshop.arch);
        let results = self.run_all(kernel, started).unwrap_or_else(|error| {
            println!("Error: {error:#}");
            Vec::new()
        });
        for (suite, outcome) in &results {
            println!("=== Linux {}: {suite}: {}", kernel.release, outcome.cell());
        }
        Rung { kernel: kernel.release.clone(), results, took: started.elapsed() }
    }

    fn run_all(&self, kernel: &Kernel, started: Instant) -> Result<Results> {
        let Self { workshop, root, built, runs, processors } = *self;
        let name = kernel.series;
        let wires = if runs.iter().any(|run| run.name == DRIVERS) {
            Some(Wires::make(&format!("tp-vm-{}-{name}", std::process::id()), wires::pairs())?)
        } else {
            None
        };
        let purpose = format!("{}-{}", workshop.arch, kernel.release);
        let machine = Machine {
            processors,
            devices: wires.iter().flat_map(|wires| Wires::arguments(wires.cards())).collect(),
            netns: wires.as_ref().map(|wires| wires.netns.0.clone()),
            ..Machine::new(workshop, kernel, root, job::script(built, runs), &purpose)
        };
        let (mut results, mut ended) = follow(&machine, name, runs, started);
        if let Err(error) = &ended {
            // An emulated processor fails occasionally; a failure that this project's programs
            // cause in a kernel happens again the next time.
            println!("[{name}] Error: {error:#}\n[{name}] once more, in a new machine …");
            (results, ended) = follow(&machine, name, runs, started);
        }
        if let Err(error) = ended {
            println!("[{name}] Error: {error:#}");
            let mut tally = Tally::default();
            tally.close("the machine", 1);
            results.push(("boot".to_owned(), Outcome { tally, took: started.elapsed() }));
        }
        // The console's log is needed to examine a failure.
        if results.iter().all(|(_, outcome)| outcome.tally.failed == 0) {
            let _ = std::fs::remove_dir_all(&machine.folder);
        }
        results.retain(|(_, outcome)| outcome.tally.counted() > 0);
        Ok(results)
    }
}

/// Runs a machine. Returns its results, and whether it completed its job.
fn follow(machine: &Machine<'_>, name: Series, runs: &[Run], started: Instant) -> (Results, Result<()>) {
    let mut results = Results::new();
    let mut begun = Instant::now();
    let mut recorder = Recorder::default();
    let ended = machine.run(|line| match job::mark(line) {
        Mark::Begin(suite) => {
            begun = Instant::now();
            results.push((suite.to_owned(), Outcome { tally: Tally::default(), took: Duration::ZERO }));
        }
        Mark::End(code) => {
            if let Some((suite, outcome)) = results.last_mut() {
                outcome.took = begun.elapsed();
                outcome.tally.close(suite, code);
                let selected = runs.iter().find(|run| run.name == *suite).and_then(|run| run.selected);
                outcome.tally.expect(suite, selected);
            }
        }
        Mark::Output(text) => {
            if !is_nothing(text) {
                println!("[{name} {:4.0} s] {text}", started.elapsed().as_secs_f32());
            }
            if let Some((_, outcome)) = results.last_mut() {
                outcome.tally.note(text);
            }
            if let Err(error) = recorder.follow(text) {
                println!("Error: {error:#}");
            }
        }
    });
    (results, ended)
}

/// Whether a line of a test program only reports that none of its tests was selected.
fn is_nothing(line: &str) -> bool {
    line.is_empty()
        || line == "running 0 tests"
        || line.starts_with("test result: ok. 0 passed; 0 failed; 0 ignored")
}
