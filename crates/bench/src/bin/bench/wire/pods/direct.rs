//! Direct forwarding beside SNAT: requests to a node port, to a pod of another node, whose answers
//! go to the client past the node in front, or through it.

use anyhow::{Context, Result};
use traffic_policy_bench_ebpf::traffic::sink;

use super::{
    super::generator::{Send, Traffic},
    flood, measure_all, rates,
};
use super::{
    FLOWS,
    subject::{Kind, Subject},
};
use crate::{
    Effort,
    report::{Goal, Report, Row, Unit},
};

const GROUP: &str = "direct, wire";
/// Round trips of direct forwarding relative to those of SNAT.
const GOAL: Goal = Goal::TimesAtLeast(1.6);
const FRONTS: [&str; 2] = ["xdp", "tc"];

fn name(kind: Kind) -> String {
    format!("requests and replies, {kind}")
}

pub(super) fn measure(effort: Effort, report: &mut Report) -> Result<()> {
    if effort.counted {
        return Ok(());
    }
    let mut wanted = Vec::new();
    for front in FRONTS {
        for kind in [Kind::Snat(front), Kind::Direct(front)] {
            let names: Vec<_> = [name(kind)].into_iter().filter(|name| report.wants(GROUP, name)).collect();
            wanted.push((kind, names));
        }
    }
    // A pair is compared: both are measured where one is wanted.
    let is_wanted = |front: &str| {
        wanted.iter().any(|(kind, names)| {
            !names.is_empty() && matches!(kind, Kind::Snat(of) | Kind::Direct(of) if *of == front)
        })
    };
    let fronts: Vec<_> = FRONTS.into_iter().filter(|front| is_wanted(front)).collect();
    wanted.retain(|(kind, _)| matches!(kind, Kind::Snat(of) | Kind::Direct(of) if fronts.contains(of)));
    measure_all(&wanted, GROUP, true, report, |subjects, traffic| {
        for subject in subjects {
            open(subject, traffic).with_context(|| format!("opening flows of {}", subject.kind))?;
        }
        let all: Vec<_> = subjects.iter().collect();
        let rates = rates(&all, traffic, effort, Send::Requests, sink::ECHO)?;
        let of = |wanted: Kind| subjects.iter().zip(&rates).find(|(subject, _)| subject.kind == wanted);
        let mut rows = Vec::new();
        for (subject, runs) in subjects.iter().zip(&rates) {
            let row = Row::new(GROUP, &name(subject.kind), Unit::Mpps, runs);
            rows.push(match subject.kind {
                Kind::Direct(front) if let Some((_, snat)) = of(Kind::Snat(front)) => {
                    row.beside("SNAT", snat).goal(GOAL)
                }
                _ => row,
            });
        }
        Ok(rows)
    })
}

/// Opens flows, and sees that both directions arrive as they should.
fn open(subject: &Subject, traffic: &mut Traffic) -> Result<()> {
    traffic.confirm_by_the_wire(&subject.fixture.client)?;
    traffic.open(&subject.fixture.client, subject.kind.path(), FLOWS)?;
    let run = flood(subject, traffic, Send::Requests, sink::ECHO | sink::VERIFY, FLOWS)?;
    super::all_answered(subject, &run)?;
    if let Kind::Direct(front) = subject.kind {
        let hook = if front == "xdp" { "xdp" } else { "tc-ingress" };
        subject.expect(0, hook, "forwarded-direct", FLOWS.into())?;
        subject.expect(1, "tc-ingress", "delivered", FLOWS.into())?;
        subject.expect(1, "tc-egress", "replied-local", FLOWS.into())?;
    }
    Ok(())
}
