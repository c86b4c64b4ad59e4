//! New flows: what all packets until a flow is confirmed cost more than as many of an open flow.

use anyhow::{Context, Result};
use traffic_policy_ebpf::outcome::Outcome;

use super::{
    established::low,
    flows::{Flow, Kind, Protocol, flows, frames, learn, remove},
    frame::Frame,
    loaded::{Hook, Loaded, Subject, Took},
    stand::Stand,
};
use crate::{
    Effort,
    report::{Goal, Report, Row, Unit},
};

/// Flows of one run: fewer than may be unconfirmed.
const NEW: u32 = 512;

#[derive(Default)]
struct Runs {
    floor: Vec<f64>,
    opening: Vec<f64>,
    answer: Vec<f64>,
    confirmation: Vec<f64>,
    more: Vec<f64>,
}

pub(crate) fn measure(stand: &Stand, effort: Effort, report: &mut Report) -> Result<()> {
    let mut loaded = Loaded::new(stand)?;
    let mut tcp = flows(false, Protocol::Tcp, NEW);
    let mut runs = Runs::default();
    for _ in 0..effort.rounds * 4 {
        round(&mut loaded, &mut tcp, &mut runs)?;
    }
    let row = |name: &str, runs: &[f64]| Row::new("new flow", name, Unit::Nanoseconds, runs);
    report.add(row("first packet (SYN)", &runs.opening));
    report.add(row("second packet (SYN-ACK)", &runs.answer));
    report.add(row("third packet (ACK)", &runs.confirmation));
    let all = row("these three, less three of an open flow", &runs.more);
    report.add(all.beside("floor", &runs.floor).goal(Goal::TimesAtMost(1.5)));
    Ok(())
}

fn round(loaded: &mut Loaded, flows: &mut [Flow], runs: &mut Runs) -> Result<()> {
    let opening = frames(flows, Kind::Opening)?;
    loaded.set_frames(&opening)?;
    let floor = timed(loaded, |loaded| loaded.run(Subject::FloorNew, NEW))?;
    runs.floor.push(floor);
    let keys: Vec<_> = loaded.floor.keys().collect::<Result<_, _>>()?;
    anyhow::ensure!(keys.len() == NEW as usize * 2, "the floor made {} halves", keys.len());
    for key in keys {
        loaded.floor.remove(&key).context("a flow of the floor is missing")?;
    }

    let first = timed(loaded, |loaded| loaded.run_to(Hook::Xdp, NEW, Outcome::Forwarded))?;
    learn(loaded, flows)?;
    let second = next(loaded, &frames(flows, Kind::Answer)?, Outcome::Replied)?;
    let request = frames(flows, Kind::Request)?;
    let third = next(loaded, &request, Outcome::Forwarded)?;
    let open = next(loaded, &request, Outcome::Forwarded)?;
    let reply = next(loaded, &frames(flows, Kind::Reply)?, Outcome::Replied)?;
    remove(loaded, flows)?;
    runs.opening.push(first);
    runs.answer.push(second);
    runs.confirmation.push(third);
    runs.more.push(first + second + third - 2.0 * open - reply);
    Ok(())
}

fn next(loaded: &mut Loaded, frames: &[Frame], outcome: Outcome) -> Result<f64> {
    loaded.set_frames(frames)?;
    timed(loaded, |loaded| loaded.run_to(Hook::Xdp, NEW, outcome))
}

/// Nanoseconds per packet of a run that cannot be repeated, less those of the feed.
fn timed(loaded: &mut Loaded, run: impl FnOnce(&mut Loaded) -> Result<Took>) -> Result<f64> {
    let mut empty = Vec::new();
    for _ in 0..3 {
        empty.push(loaded.run(Subject::Empty(Hook::Xdp), NEW)?.by_kernel);
    }
    Ok(run(loaded)?.by_kernel - low(empty))
}
