//! Local delivery: small datagrams, and requests of HTTP, to a pod of the node that is asked,
//! bypassing the stack and through it, beside the kernel's plain forwarding and kube-proxy's rules.

use std::{net::SocketAddr, thread::sleep, time::Duration};

use anyhow::{Context, Result, ensure};
use traffic_policy_bench_ebpf::traffic::{Arrived, sink};

use super::{
    super::{
        cpu::{Spent, stay},
        fixture::NODE,
        generator::{Send, TARGET_PORT, Traffic},
        http::{
            client::Client,
            server::{Server, THREADS},
        },
        services::HTTP_NODE_PORT,
    },
    FLOWS, all_answered,
    fixture::{HOST_SIDE_MAC, POD_MAC, POD_SERVER},
    flood, measure_all, rates,
    subject::{Kind, Subject},
};
use crate::{
    Effort,
    report::{Goal, Report, Row, Unit},
};

const GROUP: &str = "local delivery";
/// Time for which a flow of UDP takes the stack, with some more.
const UDP_BEGINS: Duration = Duration::from_millis(2_300);
/// Duration of a run of HTTP requests.
const WINDOW: Duration = Duration::from_millis(200);

/// Names of rows have this number.
const _: () = assert!(THREADS == 8);

/// The packets that the pod sends.
const REPLIES: Send = Send::Replies([POD_MAC, HOST_SIDE_MAC]);

/// The kinds of packets that are sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum What {
    /// Requests to the pod, none of which is answered.
    ToPod,
    /// Replies of the pod to requests from before.
    FromPod,
    RoundTrips,
    /// Requests on one connection, and on [`THREADS`].
    Http,
    HttpTogether,
}

impl What {
    fn name(self, kind: Kind) -> String {
        let what = match self {
            Self::ToPod => "UDP, to the pod",
            Self::FromPod => "UDP, from the pod",
            Self::RoundTrips => "UDP, requests and replies",
            Self::Http => "HTTP, a connection",
            Self::HttpTogether => "HTTP, 8 connections",
        };
        format!("{what}, {kind}")
    }

    fn kinds(self) -> Vec<Kind> {
        let protocol = if matches!(self, Self::Http | Self::HttpTogether) { "tcp" } else { "udp" };
        let mut kinds = vec![Kind::Past(false), Kind::Stack(false), Kind::Past(true), Kind::Stack(true)];
        kinds.push(Kind::Router);
        if self != Self::FromPod {
            // The ports that masquerading has chosen are not known here.
            kinds.extend([Kind::Nftables(protocol), Kind::Iptables(protocol)]);
        }
        kinds
    }

    /// Returns the goal of a subject, relative to the stack.
    fn goal(self, kind: Kind) -> Option<Goal> {
        match (self, kind) {
            (Self::ToPod, Kind::Past(false)) => Some(Goal::TimesAtLeast(1.8)),
            (Self::ToPod, Kind::Past(true)) => Some(Goal::TimesAtLeast(2.5)),
            (Self::HttpTogether, Kind::Past(false)) => Some(Goal::TimesAtLeast(1.12)),
            _ => None,
        }
    }
}

pub(super) fn measure(effort: Effort, report: &mut Report) -> Result<()> {
    if effort.counted {
        return Ok(());
    }
    // Those of one list have the same subjects.
    for whats in [&[What::ToPod, What::FromPod, What::RoundTrips][..], &[What::Http, What::HttpTogether]] {
        let mut wanted: Vec<(Kind, Vec<String>)> = Vec::new();
        for what in whats {
            for kind in what.kinds() {
                let name = what.name(kind);
                let name = report.wants(GROUP, &name).then_some(name);
                match wanted.iter_mut().find(|(known, _)| *known == kind) {
                    Some((_, names)) => names.extend(name),
                    None => wanted.push((kind, name.into_iter().collect())),
                }
            }
        }
        if wanted.iter().all(|(_, names)| names.is_empty()) {
            continue;
        }
        // The stack is what others are compared with.
        wanted.retain(|(kind, names)| !names.is_empty() || matches!(kind, Kind::Stack(_)));
        report.note(
            "local delivery, topology",
            "clients – veth – node – veth – pod, routed; client, node and pod on one CPU",
        );
        let floods = !whats.contains(&What::Http);
        measure_all(&wanted, GROUP, floods, report, |subjects, traffic| {
            rows(whats, &wanted, subjects, traffic, effort)
        })?;
    }
    Ok(())
}

fn rows(
    whats: &[What],
    wanted: &[(Kind, Vec<String>)],
    subjects: &[Subject],
    traffic: &mut Traffic,
    effort: Effort,
) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for what in whats {
        let is_wanted = |kind: Kind| wanted.iter().any(|(_, names)| names.contains(&what.name(kind)));
        let mut kinds = what.kinds();
        if !kinds.iter().any(|kind| is_wanted(*kind)) {
            continue;
        }
        kinds.retain(|kind| is_wanted(*kind) || matches!(kind, Kind::Stack(_)));
        let of = |kind: Kind| subjects.iter().find(|subject| subject.kind == kind);
        let those: Vec<_> = kinds.into_iter().filter_map(of).collect();
        let figures = match what {
            What::ToPod => {
                open(&those, traffic)?;
                rates(&those, traffic, effort, Send::Datagrams, 0)?
            }
            What::FromPod => {
                open(&those, traffic)?;
                replies_arrive(&those, traffic)?;
                rates(&those, traffic, effort, REPLIES, 0)?
            }
            What::RoundTrips => {
                open(&those, traffic)?;
                rates(&those, traffic, effort, Send::Datagrams, sink::ECHO)?
            }
            What::Http => http(&those, 1, traffic.cpu, effort)?,
            What::HttpTogether => http(&those, THREADS, traffic.cpu, effort)?,
        };
        rows.extend(as_rows(*what, &those, &figures));
    }
    Ok(rows)
}

fn as_rows(what: What, subjects: &[&Subject], figures: &[Vec<f64>]) -> Vec<Row> {
    let unit = if matches!(what, What::Http | What::HttpTogether) { Unit::PerSecond } else { Unit::Mpps };
    let stack = |rules: bool| {
        let found = subjects.iter().zip(figures).find(|(subject, _)| subject.kind == Kind::Stack(rules));
        found.map(|(_, runs)| runs)
    };
    let row = |(subject, runs): (&&Subject, &Vec<f64>)| {
        let row = Row::new(GROUP, &what.name(subject.kind), unit, runs);
        let row = match (subject.kind, stack(false), stack(true)) {
            (Kind::Past(true), _, Some(stack)) => row.beside("the stack, with rules", stack),
            (Kind::Stack(false), ..) => row,
            (_, Some(stack), _) => row.beside("the stack", stack),
            _ => row,
        };
        what.goal(subject.kind).into_iter().fold(row, Row::goal)
    };
    subjects.iter().zip(figures).map(row).collect()
}

/// Begins flows of UDP, and sees that both directions arrive as they should.
fn open(subjects: &[&Subject], traffic: &mut Traffic) -> Result<()> {
    for subject in subjects {
        for _ in 0..2 {
            let run = flood(subject, traffic, Send::Datagrams, sink::ECHO | sink::VERIFY, FLOWS)?;
            all_answered(subject, &run).context("datagrams through the stack")?;
        }
    }
    // Until then flows of UDP take the stack, in any case.
    sleep(UDP_BEGINS);
    for subject in subjects {
        for _ in 0..2 {
            let run = flood(subject, traffic, Send::Datagrams, sink::ECHO | sink::VERIFY, FLOWS)?;
            all_answered(subject, &run)?;
        }
        if matches!(subject.kind, Kind::Past(_)) {
            // The first reply of each flow teaches its requests the way.
            subject.expect(0, "tc-ingress", "delivered-direct", u64::from(FLOWS) / 2)?;
            subject.expect(0, "tc-ingress", "replied-direct", u64::from(FLOWS) / 2)?;
        }
    }
    Ok(())
}

/// Sees that what the pod sends arrives as it should.
fn replies_arrive(subjects: &[&Subject], traffic: &mut Traffic) -> Result<()> {
    for subject in subjects {
        let run = flood(subject, traffic, REPLIES, sink::VERIFY, FLOWS)?;
        let arrived = run.counts.of(Arrived::Reply);
        ensure!(arrived == u64::from(FLOWS), "{}: {FLOWS} replies sent: {:?}", subject.kind, run.counts);
    }
    Ok(())
}

/// Measures requests for each second of a CPU on kept connections, with the client, the node and
/// the server on one CPU.
fn http(subjects: &[&Subject], connections: usize, cpu: usize, effort: Effort) -> Result<Vec<Vec<f64>>> {
    let mut servers = Vec::new();
    for subject in subjects {
        let address = SocketAddr::from((POD_SERVER, TARGET_PORT));
        servers.push(Server::start(&subject.fixture.pod, address, move || stay(0, cpu))?);
    }
    let mut rates = vec![Vec::new(); subjects.len()];
    for _ in 0..effort.rounds {
        for (subject, rates) in subjects.iter().zip(&mut rates) {
            let to = match subject.kind {
                Kind::Router => SocketAddr::from((POD_SERVER, TARGET_PORT)),
                _ => SocketAddr::from((NODE, HTTP_NODE_PORT)),
            };
            let spent = Spent::on(cpu)?;
            let answers = subject.fixture.client.run(|| -> Result<_> {
                stay(0, cpu)?;
                Client::new(to).keep_asking_on(connections, WINDOW)
            });
            let spent = spent.since()?;
            let answers = answers.with_context(|| format!("HTTP, {}", subject.kind))?;
            ensure!(answers >= 100, "{}: only {answers} answers in {WINDOW:?}", subject.kind);
            rates.push(answers as f64 / spent.as_secs_f64());
        }
    }
    Ok(rates)
}
