//! Packets of open flows.

use anyhow::{Result, ensure};

use super::{
    generator::{Send, Traffic},
    plan::{ESTABLISHED, NFTABLES, SERVICES, by_the_floor, per_packet},
    subject::{Kind, Subject},
};
use crate::{
    Effort,
    report::{Goal, Row, Unit},
};

/// Approximate duration of each run.
const SECONDS: f64 = 0.1;
/// Fraction of lost packets above which the loss is reported.
const LOSS: f64 = 0.001;

/// The runs of one subject.
#[derive(Default)]
pub(crate) struct Runs {
    pub(crate) figures: Vec<f64>,
    pub(crate) sent: u64,
    pub(crate) arrived: u64,
}

pub(crate) fn measure(subjects: &[&Subject], traffic: &mut Traffic, effort: Effort) -> Result<Vec<Row>> {
    let mut runs: Vec<Runs> = subjects.iter().map(|_| Runs::default()).collect();
    let mut packets = Vec::new();
    for subject in subjects {
        subject.open(traffic)?;
        packets.push((capacity(subject, traffic)? * SECONDS) as u32);
    }
    for _ in 0..effort.rounds {
        for ((subject, runs), packets) in subjects.iter().zip(&mut runs).zip(&packets) {
            traffic.aim(subject.kind.path(), Send::Requests, super::FLOWS, 0)?;
            let run = traffic.flood(&subject.fixture.client, *packets)?;
            let arrived = run.counts.of(subject.wanted());
            runs.figures.push(arrived as f64 / run.took.as_secs_f64() / 1e6);
            runs.sent += run.sent;
            runs.arrived += arrived;
        }
    }
    let find = |wanted: Kind| subjects.iter().zip(&runs).find(|(subject, _)| subject.kind == wanted);
    let mut rows = rows(ESTABLISHED, Unit::Mpps, subjects, &runs, traffic);
    if let (Some((subject, ours)), Some((_, floor))) = (find(Kind::Xdp(SERVICES)), find(Kind::Floor)) {
        let row = Row::new(ESTABLISHED, &by_the_floor(subject.kind), Unit::Mpps, &ours.figures)
            .beside("floor", &floor.figures);
        rows.push(row.goal(Goal::TimesAtLeast(0.93)));
    }
    let nanoseconds = |runs: &Runs| runs.figures.iter().map(|mpps| 1e3 / mpps).collect::<Vec<_>>();
    let bounce = find(Kind::Bounce).map(|(_, runs)| nanoseconds(runs));
    for (subject, runs) in subjects.iter().zip(&runs) {
        let row = Row::new(ESTABLISHED, &per_packet(subject.kind), Unit::Nanoseconds, &nanoseconds(runs));
        match &bounce {
            Some(bounce) if subject.kind != Kind::Bounce => rows.push(row.beside("sent back", bounce)),
            _ => rows.push(row),
        }
    }
    Ok(rows)
}

/// Measures packets of open flows per second, in a short run.
pub(crate) fn capacity(subject: &Subject, traffic: &mut Traffic) -> Result<f64> {
    traffic.aim(subject.kind.path(), Send::Requests, super::FLOWS, 0)?;
    let run = traffic.flood(&subject.fixture.client, 40_000)?;
    let arrived = run.counts.of(subject.wanted());
    ensure!(arrived > 0, "nothing arrives by way of {}: {:?}", subject.kind, run.counts);
    Ok(arrived as f64 / run.took.as_secs_f64())
}

/// Returns one row for each subject, with kube-proxy's nftables as the reference, and with goals
/// for our rows. Reports losses.
pub(crate) fn rows(
    group: &str,
    unit: Unit,
    subjects: &[&Subject],
    runs: &[Runs],
    traffic: &mut Traffic,
) -> Vec<Row> {
    let mut rows = Vec::new();
    let find = |wanted: Kind| subjects.iter().zip(runs).find(|(subject, _)| subject.kind == wanted);
    let nftables = find(NFTABLES).map(|(_, runs)| &runs.figures);
    for (subject, runs) in subjects.iter().zip(runs) {
        let row = Row::new(group, &subject.kind.to_string(), unit, &runs.figures);
        let row = match nftables {
            Some(nftables) if subject.kind != NFTABLES => row.beside("nftables, 1k", nftables),
            _ => row,
        };
        let row = match subject.kind {
            Kind::Xdp(SERVICES) if nftables.is_some() => row.goal(Goal::TimesAtLeast(6.0)),
            Kind::Tc(SERVICES) if nftables.is_some() => row.goal(Goal::TimesAtLeast(1.5)),
            _ => row,
        };
        rows.push(row);
        let lost = 1.0 - runs.arrived as f64 / runs.sent as f64;
        if lost > LOSS {
            traffic.losses.push(format!(
                "{group}, {}: {:.1} % of the packets sent were lost; what arrived is counted",
                subject.kind,
                lost * 100.0
            ));
        }
    }
    rows
}
