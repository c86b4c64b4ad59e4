//! Round trips to a pod: requests from clients through one or two nodes to a pod, whose answers
//! come back. Everything happens on one CPU, so the rate is that of all work for both directions,
//! for each second of that CPU's time: what else runs there does not count.

mod direct;
mod fixture;
mod local_delivery;
mod subject;

use anyhow::{Result, ensure};
use traffic_policy_bench_ebpf::traffic::{Arrived, sink};

use self::subject::{Kind, Subject};
use super::{
    cpu::{self, Spent},
    fixture::UPLINK,
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

/// Starts subjects, for floods or for sockets, and measures the rows of those that could be
/// started.
fn measure_all(
    wanted: &[(Kind, Vec<String>)],
    group: &str,
    floods: bool,
    report: &mut Report,
    mut measure: impl FnMut(&[Subject], &mut Traffic) -> Result<Vec<Row>>,
) -> Result<()> {
    let Some((subjects, mut traffic)) = start(wanted, group, floods, report)? else { return Ok(()) };
    report.measure(|| Ok(only(wanted, measure(&subjects, &mut traffic)?)))
}

/// Starts subjects, for floods or for sockets, without those that cannot be started; `None` if no
/// row is wanted.
fn start(
    wanted: &[(Kind, Vec<String>)],
    group: &str,
    floods: bool,
    report: &mut Report,
) -> Result<Option<(Vec<Subject>, Traffic)>> {
    if wanted.iter().all(|(_, names)| names.is_empty()) {
        return Ok(None);
    }
    let mut traffic = Traffic::load(cpu::busy()?)?;
    let mut subjects = Vec::new();
    for (kind, names) in wanted {
        match Subject::start(*kind, floods, &mut traffic) {
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
    match send {
        Send::Replies(_) => traffic.flood_by(&subject.fixture.pod, UPLINK, packets),
        _ => traffic.flood(&subject.fixture.client, packets),
    }
}

/// Returns the number of packets that have arrived, of those that count; fails unless that is
/// nearly all that was sent, and none has arrived that was not expected.
fn arrived(subject: &Subject, run: &Run, counted: Arrived) -> Result<u64> {
    let arrived = run.counts.of(counted);
    ensure!(
        run.counts.of(Arrived::Wrong) == 0 && arrived > 0 && arrived * 100 >= run.sent * 95,
        "{}: {} packets sent, but arrived: {:?}",
        subject.kind,
        run.sent,
        run.counts
    );
    Ok(arrived)
}

/// Returns the rate of each subject in each of several interleaved runs, in millions a second of a
/// CPU: answers, or requests where none is answered.
fn rates(
    subjects: &[&Subject],
    traffic: &mut Traffic,
    effort: Effort,
    send: Send,
    flags: u32,
) -> Result<Vec<Vec<f64>>> {
    let answered = flags & sink::ECHO != 0 || matches!(send, Send::Replies(_));
    let counted = if answered { Arrived::Reply } else { Arrived::Request };
    let asked = if let Send::Replies(_) = send { Send::Datagrams } else { send };
    let mut once = |subject: &Subject, packets: u32| -> Result<f64> {
        // The way into a pod is forgotten where it has had no answer for five seconds.
        flood(subject, traffic, asked, sink::ECHO, 2 * FLOWS)?;
        let spent = Spent::on(traffic.cpu)?;
        let run = flood(subject, traffic, send, flags, packets)?;
        let spent = spent.since()?;
        Ok(arrived(subject, &run, counted)? as f64 / spent.as_secs_f64() / 1e6)
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
