//! Direct forwarding beside SNAT: requests to a node port, to a pod of another node, whose answers
//! go to the client past the node in front, or through it.
//!
//! Two figures of the same round trips. On one CPU: the rate, which is that of all work of both
//! nodes. In front: the round trips for each second of CPU time of the node in front alone, which
//! is its capacity where the pod's node is another machine.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use traffic_policy_bench_ebpf::traffic::{Arrived, sink};

use super::{
    super::{
        cpu::spent,
        generator::{Send, Traffic},
    },
    FLOWS, arrived, flood, only, rates, start,
    subject::{Kind, Subject},
};
use crate::{
    Effort,
    report::{Goal, Report, Row, Unit},
};

const GROUP: &str = "direct, wire";
/// Round trips of direct forwarding for each second of CPU time in front, relative to those of
/// SNAT.
const GOAL: Goal = Goal::TimesAtLeast(1.6);
const FRONTS: [&str; 2] = ["xdp", "tc"];
/// Packets of a run in which the CPU time of the node in front is measured.
const PACKETS: u32 = 100_000;
/// The least CPU time for receiving and sending one packet.
const LEAST: Duration = Duration::from_nanos(50);

fn name(kind: Kind) -> String {
    format!("requests and replies, {kind}")
}

fn name_in_front(kind: Kind) -> String {
    format!("round trips for a CPU-second in front, {kind}")
}

pub(super) fn measure(effort: Effort, report: &mut Report) -> Result<()> {
    if effort.counted {
        return Ok(());
    }
    let mut wanted = Vec::new();
    for front in FRONTS {
        for kind in [Kind::Snat(front), Kind::Direct(front)] {
            let names = [name(kind), name_in_front(kind)];
            let names: Vec<_> = names.into_iter().filter(|name| report.wants(GROUP, name)).collect();
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
    let Some((subjects, mut traffic)) = start(&wanted, GROUP, true, report)? else { return Ok(()) };
    for subject in &subjects {
        open(subject, &mut traffic).with_context(|| format!("opening flows of {}", subject.kind))?;
    }
    let all: Vec<_> = subjects.iter().collect();
    let is_wanted =
        |name: fn(Kind) -> String| wanted.iter().any(|(kind, names)| names.contains(&name(*kind)));
    let mut results = Vec::new();
    if is_wanted(name) {
        results.push(report.measure(|| {
            let runs = rates(&all, &mut traffic, effort, Send::Requests, sink::ECHO)?;
            Ok(only(&wanted, beside_snat(&all, &runs, name, None)))
        }));
    }
    // This part is last: it changes how a node receives.
    if is_wanted(name_in_front) {
        let mut threads = Vec::new();
        for subject in &subjects {
            let own = subject.fixture.receive_in_threads(traffic.cpu);
            threads.push(own.with_context(|| format!("threads of {}", subject.kind))?);
        }
        results.push(report.measure(|| {
            let runs = in_front(&all, &threads, &mut traffic, effort)?;
            Ok(only(&wanted, beside_snat(&all, &runs, name_in_front, Some(GOAL))))
        }));
    }
    results.into_iter().collect()
}

/// Makes the rows of these runs, those of direct forwarding beside those of SNAT.
fn beside_snat(
    subjects: &[&Subject],
    all: &[Vec<f64>],
    name: fn(Kind) -> String,
    goal: Option<Goal>,
) -> Vec<Row> {
    let of = |wanted: Kind| subjects.iter().zip(all).find(|(subject, _)| subject.kind == wanted);
    let row = |(subject, runs): (&&Subject, &Vec<f64>)| {
        let row = Row::new(GROUP, &name(subject.kind), Unit::Mpps, runs);
        match (subject.kind, goal) {
            (Kind::Direct(front), goal) if let Some((_, snat)) = of(Kind::Snat(front)) => {
                let row = row.beside("SNAT", snat);
                if let Some(goal) = goal { row.goal(goal) } else { row }
            }
            _ => row,
        }
    };
    subjects.iter().zip(all).map(row).collect()
}

/// Returns the round trips of each subject in each of several interleaved runs, in millions for
/// each second of CPU time of the node in front, of which these are the threads.
fn in_front(
    subjects: &[&Subject],
    threads: &[Vec<i32>],
    traffic: &mut Traffic,
    effort: Effort,
) -> Result<Vec<Vec<f64>>> {
    let mut rates = vec![Vec::new(); subjects.len()];
    for _ in 0..effort.rounds {
        for ((subject, rates), threads) in subjects.iter().zip(&mut rates).zip(threads) {
            flood(subject, traffic, Send::Requests, sink::ECHO, 2 * FLOWS)?;
            let before = spent_by(threads)?;
            let run = flood(subject, traffic, Send::Requests, sink::ECHO, PACKETS)?;
            let took = spent_by(threads)? - before;
            let answers = arrived(subject, &run, Arrived::Reply)?;
            ensure!(
                took >= LEAST * run.sent as u32,
                "{}: {took:?} of CPU time for {} packets: others have done the work of the node in front",
                subject.kind,
                run.sent
            );
            rates.push(answers as f64 / took.as_secs_f64() / 1e6);
        }
    }
    Ok(rates)
}

fn spent_by(threads: &[i32]) -> Result<Duration> {
    threads.iter().map(|thread| spent(*thread)).sum()
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
