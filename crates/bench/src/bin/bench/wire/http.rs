//! Requests over HTTP/1.1 from a client's process through the node to the endpoint's server:
//! latency, and connections per second, without other traffic and with a flood of half of the
//! subject's capacity.
//!
//! The node receives on one CPU, on which the flood begins, too; client and server run on another,
//! if there is one. A single client sends the next request after each answer.

pub(super) mod client;
pub(super) mod server;

use std::{net::SocketAddr, time::Duration};

use anyhow::{Context, Result, ensure};

use self::{client::Client, server::Server};
use super::{
    background::flooded,
    cpu::keep_off,
    established::capacity,
    fixture::{DOWNLINK, NODE, SERVER, UPLINK, WireTestbed},
    generator::{TARGET_PORT, Traffic},
    plan::{Background, CONNECTIONS, NFTABLES, PERCENTILES, REQUESTS, WAYS, latency},
    services::HTTP_NODE_PORT,
    subject::{Kind, Subject},
    threaded::receive_on,
};
use crate::{
    Effort,
    report::{Row, Unit},
};

/// Duration of each mode of requests.
const WINDOW: Duration = Duration::from_millis(300);

/// Results of one subject against one background.
#[derive(Default)]
struct Runs {
    percentiles: Percentiles,
    connections: Vec<f64>,
    /// Background load that arrived, as a fraction of the subject's capacity.
    load: Vec<f64>,
}

/// Microseconds by mode, then by percentile.
type Percentiles = [[Vec<f64>; PERCENTILES.len()]; WAYS.len()];

pub(crate) fn measure(subjects: &[&Subject], traffic: &mut Traffic, effort: Effort) -> Result<Vec<Row>> {
    let mut served = Vec::new();
    for subject in subjects {
        let server = {
            let (address, busy) = (SocketAddr::from((SERVER, TARGET_PORT)), traffic.cpu);
            Server::start(&subject.fixture.endpoint, address, move || keep_off(0, busy))?
        };
        subject.open(traffic)?;
        let half = capacity(subject, traffic)? / 2.0;
        for device in [UPLINK, DOWNLINK] {
            receive_on(&subject.fixture.node, device, traffic.cpu)?;
        }
        served.push((*subject, half, server));
    }
    let mut runs: Vec<[Runs; 2]> = subjects.iter().map(|_| Default::default()).collect();
    for _ in 0..effort.rounds {
        for ((subject, half, _), runs) in served.iter().zip(&mut runs) {
            for (background, runs) in Background::BOTH.into_iter().zip(runs) {
                let busy = traffic.cpu;
                let (percentiles, connections) = (&mut runs.percentiles, &mut runs.connections);
                let ask = || ask(&subject.fixture, subject.kind, busy, percentiles, connections);
                let rate = if background == Background::None { 0.0 } else { *half };
                let ((), arrived) = flooded(subject, traffic, rate, ask)
                    .with_context(|| format!("HTTP by way of {}", background.name(subject.kind)))?;
                runs.load.push(arrived / *half * 0.5);
            }
        }
    }
    for (subject, [_, runs]) in subjects.iter().zip(&runs) {
        let mean = runs.load.iter().sum::<f64>() / runs.load.len() as f64;
        let load = format!("{:.0} % of what it can do", mean * 100.0);
        traffic.notes.insert(format!("wire, HTTP, load beside it, {}", subject.kind), load);
    }
    Ok(rows(subjects, &runs))
}

/// Runs both modes of requests, one after the other.
fn ask(
    fixture: &WireTestbed,
    kind: Kind,
    busy: usize,
    percentiles: &mut Percentiles,
    connections: &mut Vec<f64>,
) -> Result<()> {
    let server = match kind {
        Kind::Router => SocketAddr::from((SERVER, TARGET_PORT)),
        _ => SocketAddr::from((NODE, HTTP_NODE_PORT)),
    };
    let [kept, fresh] = fixture.client.run(|| -> Result<_> {
        keep_off(0, busy)?;
        let client = Client::new(server);
        Ok([client.keep_asking(WINDOW)?, client.keep_connecting(WINDOW)?])
    })?;
    connections.push(fresh.len() as f64 / WINDOW.as_secs_f64());
    for (mut times, percentiles) in [kept, fresh].into_iter().zip(percentiles) {
        ensure!(times.len() >= 100, "only {} answers in {WINDOW:?}", times.len());
        times.sort_unstable();
        for ((_, fraction, _), percentile) in PERCENTILES.iter().zip(percentiles) {
            let at = ((times.len() - 1) as f64 * fraction).round() as usize;
            percentile.push(times[at].as_secs_f64() * 1e6);
        }
    }
    Ok(())
}

type Name<'a> = dyn Fn(Kind) -> String + 'a;
type Figures<'a> = dyn Fn(&Runs) -> &[f64] + 'a;

fn rows(subjects: &[&Subject], runs: &[[Runs; 2]]) -> Vec<Row> {
    let mut rows = Vec::new();
    let reference =
        subjects.iter().zip(runs).find(|(subject, _)| subject.kind == NFTABLES).map(|(_, runs)| runs);
    let all = || Background::BOTH.into_iter().enumerate();
    let mut add = |place: (&str, Unit), bound, b: usize, name: &Name<'_>, of: &Figures<'_>| {
        for (subject, runs) in subjects.iter().zip(runs) {
            let row = Row::new(place.0, &name(subject.kind), place.1, of(&runs[b])).bound(bound);
            rows.push(match reference {
                Some(reference) if subject.kind != NFTABLES => row.beside("nftables, 1k", of(&reference[b])),
                _ => row,
            });
        }
    };
    for (b, background) in all() {
        for (w, way) in WAYS.into_iter().enumerate() {
            for (p, (percentile, _, bound)) in PERCENTILES.into_iter().enumerate() {
                let name = |kind| latency(way, percentile, background, kind);
                add((REQUESTS, Unit::Microseconds), bound, b, &name, &|runs| &runs.percentiles[w][p]);
            }
        }
    }
    for (b, background) in all() {
        let name = |kind| background.name(kind);
        add((CONNECTIONS, Unit::PerSecond), 0.1, b, &name, &|runs| &runs.connections);
    }
    rows
}
