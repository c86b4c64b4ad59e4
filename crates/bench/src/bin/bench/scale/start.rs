//! The first sync of all objects.

use std::time::Instant;

use anyhow::{Context, Result, ensure};

use super::{
    ENDPOINTS, Rows, add,
    footprint::{Memory, cpu_time},
    named,
    stage::{PATIENCE, Stage},
};
use crate::report::{Goal, Report, Row, Unit};

const GROUP: &str = "scale, first sync";
const ROWS: [&str; 4] = [
    "complete lists to maps",
    "process start to ready (lists by a slow API server)",
    "CPU time of the agent until ready",
    "most memory until ready",
];

fn names(services: u32) -> [String; 4] {
    ROWS.map(|row| format!("{row}, {}", named(services)))
}

pub(super) fn rows(services: u32) -> Rows {
    names(services).into_iter().map(|name| (GROUP, name)).collect()
}

/// Figures of starts, with one element for each start.
#[derive(Default)]
pub(super) struct Starts {
    /// Milliseconds from complete lists to the maps.
    pub(super) synced: Vec<f64>,
    /// Milliseconds from the start of the process until it is ready.
    ready: Vec<f64>,
    /// CPU time until then, in milliseconds.
    used: Vec<f64>,
    /// Peak memory in megabytes.
    peak: Vec<f64>,
}

impl Starts {
    /// Measures the take-over from an agent that had a single Service, whose traffic continues.
    pub(super) fn take_over(&mut self, stage: &mut Stage) -> Result<()> {
        stage.agent.stop()?;
        stage.put_all()?;
        self.start(stage)?;
        // Only changes follow, which a server with a long history would be slow to find.
        stage.control_plane.server().compact();
        Ok(())
    }

    /// Measures the start on a node without any state.
    pub(super) fn anew(&mut self, stage: &mut Stage) -> Result<()> {
        stage.agent.stop()?;
        let cleaned = stage.agent.command(&["cleanup"])?;
        ensure!(cleaned.status.success(), "cleanup failed: {}", String::from_utf8_lossy(&cleaned.stderr));
        self.start(stage)
    }

    fn start(&mut self, stage: &mut Stage) -> Result<()> {
        let said = stage.agent.log().len();
        let start = Instant::now();
        stage.agent.start_again()?;
        stage.agent.wait_ready(PATIENCE)?;
        self.ready.push(start.elapsed().as_secs_f64() * 1e3);
        self.used.push(cpu_time(stage.pid()?)?.as_secs_f64() * 1e3);
        self.peak.push(Memory::of(stage.pid()?)?.peak);
        stage.maps()?.check(stage.services - 1, ENDPOINTS)?;

        let log = stage.agent.log();
        let log = log.get(said..).context("the agent's log has become shorter")?;
        let listed = log.lines().filter(|line| line.contains("are listed")).filter_map(seconds).next_back();
        let listed = listed.context("the agent does not say when its lists are complete")?;
        let first = log.lines().find(|line| line.contains("first sync")).context("no first sync")?;
        let writes = first.split_once("writes=").and_then(|(_, number)| number.trim().parse::<u32>().ok());
        ensure!(writes >= Some(stage.services * ENDPOINTS), "this was no first sync of everything: {first}");
        self.synced.push((seconds(first).context("no time in the log")? - listed) * 1e3);
        Ok(())
    }

    pub(super) fn report(&self, services: u32, report: &mut Report) {
        let [synced, ready, used, peak] = names(services);
        let row = Row::new(GROUP, &synced, Unit::Milliseconds, &self.synced);
        add(report, row.goal(Goal::AtMost(2_000.0)));
        add(report, Row::new(GROUP, &ready, Unit::Milliseconds, &self.ready));
        add(report, Row::new(GROUP, &used, Unit::Milliseconds, &self.used));
        add(report, Row::new(GROUP, &peak, Unit::Megabytes, &self.peak));
    }
}

/// Returns the time of a log line, in seconds of the day.
fn seconds(line: &str) -> Option<f64> {
    let (_, time) = line.split_once('T')?;
    let (time, _) = time.split_once('Z')?;
    time.split(':').try_fold(0.0, |sum, part| Some(sum * 60.0 + part.parse::<f64>().ok()?))
}
