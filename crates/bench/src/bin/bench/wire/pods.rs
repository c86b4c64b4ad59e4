//! Round trips to a pod: requests from clients through one or two nodes to a pod, whose answers
//! come back. Everything happens on one CPU, so the rate is that of all work for both directions.

mod direct;
mod fixture;
mod local_delivery;
mod subject;

use anyhow::{Result, ensure};
use traffic_policy_bench_ebpf::traffic::{Arrived, sink};

use self::subject::{Kind, Subject};
use super::{
    cpu,
    generator::{Run, Send, Traffic},
};
use crate::{
    Effort,
    report::{Report, Row},
};

/// Number of open flows.
const FLOWS: u32 = 1_000;
/// Approximate duration of each run.
const SECONDS: f64 = 0.1;
/// Packets of the run that shows how many make a run of that duration.
const TRIAL: u32 = 20_000;

pub(crate) fn measure(effort: Effort, report: &mut Report) -> Result<()> {
    direct::measure(effort, report)?;
    local_delivery::measure(effort, report)
}

/// Starts subjects, and measures the rows of those that could be started.
fn measure_all(
    wanted: &[(Kind, Vec<String>)],
    group: &str,
    report: &mut Report,
    mut measure: impl FnMut(&[Subject], &mut Traffic) -> Result<Vec<Row>>,
) -> Result<()> {
    let Some((subjects, mut traffic)) = start(wanted, group, report)? else { return Ok(()) };
    report.measure(|| Ok(only(wanted, measure(&subjects, &mut traffic)?)))
}

/// Starts subjects, without those that cannot be started; `None` if no row is wanted.
fn start(
    wanted: &[(Kind, Vec<String>)],
    group: &str,
    report: &mut Report,
) -> Result<Option<(Vec<Subject>, Traffic)>> {
    if wanted.iter().all(|(_, names)| names.is_empty()) {
        return Ok(None);
    }
    let mut traffic = Traffic::load(cpu::busy()?)?;
    let mut subjects = Vec::new();
    for (kind, names) in wanted {
        match Subject::start(*kind, &mut traffic) {
            Ok(subject) => subjects.push(subject),
            Err(error) => names.iter().for_each(|name| report.skip(group, name, format!("{error:#}"))),
        }
    }
    Ok(Some((subjects, traffic)))
}

/// Returns the rows that are wanted.
fn only(wanted: &[(Kind, Vec<String>)], mut rows: Vec<Row>) -> Vec<Row> {
    rows.retain(|row| wanted.iter().any(|(_, names)| names.contains(&row.name)));
    rows
}

/// Sends packets of open flows, with an answer to each if `flags` has [`sink::ECHO`].
fn flood(subject: &Subject, traffic: &mut Traffic, send: Send, flags: u32, packets: u32) -> Result<Run> {
    traffic.aim(subject.kind.path(), send, FLOWS, flags)?;
    traffic.flood(&subject.fixture.client, packets)
}

/// Returns the rate of each subject in each of several interleaved runs, in millions a second:
/// answers, or requests where none is answered.
fn rates(
    subjects: &[&Subject],
    traffic: &mut Traffic,
    effort: Effort,
    send: Send,
    flags: u32,
) -> Result<Vec<Vec<f64>>> {
    let counted = if flags & sink::ECHO == 0 { Arrived::Request } else { Arrived::Reply };
    let mut once = |subject: &Subject, packets: u32| -> Result<f64> {
        // The way into a pod is forgotten where it has had no answer for five seconds.
        flood(subject, traffic, send, sink::ECHO, 2 * FLOWS)?;
        let run = flood(subject, traffic, send, flags, packets)?;
        let arrived = run.counts.of(counted);
        ensure!(arrived > 0, "nothing arrives by way of {}: {:?}", subject.kind, run.counts);
        ensure!(
            run.counts.of(Arrived::Wrong) == 0 && arrived * 100 >= run.sent * 95,
            "{}: {} packets sent, but arrived: {:?}",
            subject.kind,
            run.sent,
            run.counts
        );
        Ok(arrived as f64 / run.took.as_secs_f64() / 1e6)
    };
    let mut packets = Vec::new();
    for subject in subjects {
        packets.push((once(subject, TRIAL)? * 1e6 * SECONDS) as u32);
    }
    let mut rates = vec![Vec::new(); subjects.len()];
    for _ in 0..effort.rounds {
        for ((subject, rates), packets) in subjects.iter().zip(&mut rates).zip(&packets) {
            rates.push(once(subject, *packets)?);
        }
    }
    Ok(rates)
}

/// Fails unless each of [`FLOWS`] packets has arrived, and its answer.
fn all_answered(subject: &Subject, run: &Run) -> Result<()> {
    for arrived in [Arrived::Request, Arrived::Reply] {
        let number = run.counts.of(arrived);
        ensure!(
            number == u64::from(FLOWS),
            "{}: {FLOWS} packets sent, {number} {arrived:?}: {:?}",
            subject.kind,
            run.counts
        );
    }
    Ok(())
}
