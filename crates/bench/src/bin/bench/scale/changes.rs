//! Time from a change of one endpoint to the maps.

use std::{
    thread::{self, sleep},
    time::{Duration, Instant},
};

use anyhow::Result;

use super::{
    ENDPOINTS, Rows, add, cluster, cpus, named,
    stage::{Maps, Stage},
};
use crate::{
    Effort,
    report::{Goal, Report, Row, Unit},
};

/// Distance of changes. The agent gathers changes that follow each other within 50 ms; these are to
/// be separate. It is prime, so that they meet the agent's periodic work of each second at all
/// phases.
const APART: Duration = Duration::from_millis(67);

const GROUP: &str = "scale, change of an endpoint to maps";

/// Returns the rows; `flows` is the number of flows meanwhile.
pub(super) fn rows(services: u32, flows: u32) -> Rows {
    let [p50, p99] = names(services, flows);
    vec![(GROUP, p50), (GROUP, p99)]
}

fn names(services: u32, flows: u32) -> [String; 2] {
    let flows = if flows == 0 { String::new() } else { format!(", {}k flows", flows / 1_000) };
    ["p50", "p99"].map(|percentile| format!("{percentile}, {}{flows}", named(services)))
}

pub(super) fn measure(stage: &Stage, effort: Effort, report: &mut Report) -> Result<()> {
    let any = |i: u32| i * 7_919 % stage.services;
    report_times(&times(stage, effort, any)?, stage.services, 0, report);
    Ok(())
}

pub(super) fn report_times(took: &[f64], services: u32, flows: u32, report: &mut Report) {
    let [p50, p99] = names(services, flows);
    add(report, Row::new(GROUP, &p50, Unit::Milliseconds, took));
    let row = Row::new(GROUP, &p99, Unit::Milliseconds, &[percentile(took, 99)]);
    add(report, row.goal(Goal::AtMost(5.0)));
}

/// Returns the milliseconds from an update of the API server until the maps show it, for one change
/// each. The n-th Service that changes is `choose(n)`.
pub(super) fn times(
    stage: &Stage,
    effort: Effort,
    choose: impl Fn(u32) -> u32 + Send + Sync,
) -> Result<Vec<f64>> {
    let cpus = cpus::all()?;
    let number = if effort.full { 300 } else { 150 };
    let maps = stage.maps()?;
    let run = || (0..number).map(|i| change(stage, &maps, i, choose(i / 2))).collect();
    let Some((own, others @ [_, ..])) = cpus.split_last() else {
        eprintln!(
            "  a single CPU: who looks at the maps is in the agent's way, and what follows is too slow"
        );
        return run();
    };
    cpus::confine_all(stage.pid()?, others)?;
    let took = thread::scope(|scope| {
        let measuring = scope.spawn(|| -> Result<Vec<f64>> {
            cpus::run_on(&[*own])?;
            run()
        });
        measuring.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    });
    cpus::confine_all(stage.pid()?, &cpus)?;
    took
}

/// Removes an endpoint from a Service, and restores it the next time.
fn change(stage: &Stage, maps: &Maps, i: u32, service: u32) -> Result<f64> {
    let endpoints = if i.is_multiple_of(2) { ENDPOINTS - 1 } else { ENDPOINTS };
    let slices = cluster::slices(service, 0..endpoints);
    sleep(APART);
    let before = maps.frontend(service);
    let start = Instant::now();
    slices.into_iter().try_for_each(|slice| stage.control_plane.server().put(slice))?;
    let took = maps.wait(service, before)? - start;
    maps.check(service, endpoints)?;
    Ok(took.as_secs_f64() * 1e3)
}

/// Returns the smallest value that at least `percent` percent of the values do not exceed.
pub(super) fn percentile(values: &[f64], percent: usize) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let at = (sorted.len() * percent).div_ceil(100).saturating_sub(1);
    sorted.get(at).copied().unwrap_or(f64::NAN)
}
