//! Packets of open flows.

use anyhow::{Result, ensure};

use super::{
    generator::{Send, Traffic},
    subject::{Kind, Subject},
};
use crate::{
    Effort,
    report::{Goal, Report, Row, Unit},
};

const GROUP: &str = "on the wire, established";

/// So long is each run, about.
const SECONDS: f64 = 0.1;
/// More than so many lost, as a fraction, is said.
const LOSS: f64 = 0.001;

/// The runs of one subject.
#[derive(Default)]
pub(crate) struct Runs {
    pub(crate) mpps: Vec<f64>,
    sent: u64,
    arrived: u64,
}

pub(crate) fn measure(
    subjects: &[Subject],
    traffic: &mut Traffic,
    effort: Effort,
    report: &mut Report,
) -> Result<Vec<f64>> {
    let mut runs: Vec<Runs> = subjects.iter().map(|_| Runs::default()).collect();
    let mut packets = vec![20_000_u32; subjects.len()];
    for subject in subjects {
        subject.open(traffic)?;
    }
    // The first round finds out how many packets a run takes, and is not counted.
    for round in 0..=effort.rounds {
        for ((subject, runs), packets) in subjects.iter().zip(&mut runs).zip(&mut packets) {
            traffic.aim(subject.kind.path(), Send::Requests, super::FLOWS, 0)?;
            let run = traffic.flood(&subject.stand, *packets)?;
            let arrived = run.counts.of(subject.wanted());
            ensure!(arrived > 0, "nothing arrives by way of {}: {:?}", subject.kind, run.counts);
            let rate = arrived as f64 / run.took.as_secs_f64();
            if round == 0 {
                *packets = ((rate * SECONDS) as u32).next_multiple_of(super::FLOWS);
                continue;
            }
            runs.mpps.push(rate / 1e6);
            runs.sent += run.sent;
            runs.arrived += arrived;
        }
    }
    rows(GROUP, subjects, &runs, report);
    Ok(runs.iter().map(|runs| median(&runs.mpps)).collect())
}

fn median(runs: &[f64]) -> f64 {
    let mut sorted = runs.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[sorted.len() / 2]
}

pub(crate) fn rows(group: &str, subjects: &[Subject], runs: &[Runs], report: &mut Report) {
    let find = |kind: Kind| subjects.iter().zip(runs).find(|(subject, _)| subject.kind == kind);
    let reference = find(Kind::Nftables(super::SERVICES)).map(|(_, runs)| runs);
    let floor = find(Kind::Floor).map(|(_, runs)| runs);
    for (subject, runs) in subjects.iter().zip(runs) {
        let kind = subject.kind;
        let row = || Row::new(group, &kind.to_string(), Unit::Mpps, &runs.mpps);
        if let (Kind::Xdp(super::SERVICES), Some(floor)) = (kind, floor) {
            report.add(row().beside("floor", &floor.mpps).goal(Goal::TimesAtLeast(0.93)));
        }
        match (kind, reference) {
            (Kind::Nftables(super::SERVICES), _) | (_, None) => report.add(row()),
            (Kind::Xdp(super::SERVICES), Some(nftables)) => {
                report.add(row().beside("nftables, 1k", &nftables.mpps).goal(Goal::TimesAtLeast(6.0)));
            }
            (Kind::Tc(super::SERVICES), Some(nftables)) => {
                report.add(row().beside("nftables, 1k", &nftables.mpps).goal(Goal::TimesAtLeast(1.5)));
            }
            (_, Some(nftables)) => report.add(row().beside("nftables, 1k", &nftables.mpps)),
        }
        let lost = 1.0 - runs.arrived as f64 / runs.sent as f64;
        if lost > LOSS {
            eprintln!("  {group}, {kind}: {:.1} % of the packets sent were lost; what arrived is counted", lost * 100.0);
        }
    }
}
