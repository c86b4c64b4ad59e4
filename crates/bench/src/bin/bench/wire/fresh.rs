//! New flows: an unanswered SYN, and a whole handshake.
//!
//! The cost of a new flow differs by design: the kernel has an unconfirmed connection of its own
//! for each SYN and holds 262,144 of them here; traffic-policy has a queue of 65,536 places for
//! flows that no handshake has confirmed, where the newest evict the oldest. So both are measured,
//! with a number of flows that all of them can hold. Tables are emptied after each run.

use anyhow::{Result, ensure};
use traffic_policy_bench_ebpf::traffic::{Arrived, sink};
use traffic_policy_dataplane::MapSizes;

use super::{
    established::{Runs, rows},
    generator::{Run, Send, Traffic},
    plan::{HANDSHAKES, OPENINGS},
    subject::Subject,
};
use crate::{
    Effort,
    report::{Row, Unit},
};

/// Number of new flows of one run, the same for all subjects, as a fuller table is slower: the
/// number of places in the queue of unassured flows. Only a subject that would take longer than a
/// second for them (long lists of iptables) gets as many as it opens in that time.
const MOST: u32 = MapSizes::DEFAULT.unassured;
const LEAST: u32 = 2_048;
const SECONDS: f64 = 1.0;

pub(crate) fn openings(subjects: &[&Subject], traffic: &mut Traffic, effort: Effort) -> Result<Vec<Row>> {
    let runs = measure(subjects, traffic, effort, 0, Arrived::Opening)?;
    Ok(rows(OPENINGS, Unit::Mpps, subjects, &runs, traffic))
}

pub(crate) fn handshakes(subjects: &[&Subject], traffic: &mut Traffic, effort: Effort) -> Result<Vec<Row>> {
    // The third packet is the one without SYN.
    let mut runs = measure(subjects, traffic, effort, sink::ANSWER | sink::CONFIRM, Arrived::Request)?;
    runs.iter_mut().flat_map(|runs| &mut runs.figures).for_each(|figure| *figure *= 1e6);
    Ok(rows(HANDSHAKES, Unit::PerSecond, subjects, &runs, traffic))
}

/// Measures the packets that must arrive once for each flow, in millions a second.
fn measure(
    subjects: &[&Subject],
    traffic: &mut Traffic,
    effort: Effort,
    flags: u32,
    wanted: Arrived,
) -> Result<Vec<Runs>> {
    for subject in subjects {
        subject.empty()?;
    }
    let mut once = |subject: &Subject, flows: u32| -> Result<(Run, u64)> {
        traffic.aim(subject.kind.path(), Send::Openings, flows, flags)?;
        let run = traffic.flood(&subject.fixture.client, flows)?;
        // The table is emptied at once: the kernel's table of connections is one for all
        // namespaces.
        subject.empty()?;
        let arrived = run.counts.of(wanted);
        ensure!(arrived > 0, "nothing arrives by way of {}: {:?}", subject.kind, run.counts);
        Ok((run, arrived))
    };
    let mut flows = Vec::new();
    for subject in subjects {
        let (run, _) = once(subject, LEAST)?;
        let most = f64::from(LEAST) * SECONDS / run.took.as_secs_f64();
        flows.push((most as u32).clamp(LEAST, MOST));
    }
    let mut runs: Vec<Runs> = subjects.iter().map(|_| Runs::default()).collect();
    for _ in 0..effort.rounds {
        for ((subject, runs), flows) in subjects.iter().zip(&mut runs).zip(&flows) {
            let (run, arrived) = once(subject, *flows)?;
            runs.figures.push(arrived as f64 / run.took.as_secs_f64() / 1e6);
            runs.sent += run.sent;
            runs.arrived += arrived;
        }
    }
    for (subject, flows) in subjects.iter().zip(flows) {
        if flows != MOST {
            let key = format!("wire, new flows of one run, {}", subject.kind);
            traffic.notes.insert(key, format!("{flows} instead of {MOST}"));
        }
    }
    Ok(runs)
}
