//! Rows: all of them, those requested, and the subjects that they need.

use std::collections::BTreeSet;

use super::subject::Kind;
use crate::{
    Effort,
    report::{Report, Row},
};

/// Number of Services, unless stated otherwise.
pub(crate) const SERVICES: u32 = 1_000;

const XDP: Kind = Kind::Xdp(SERVICES);
const TC: Kind = Kind::Tc(SERVICES);
pub(crate) const NFTABLES: Kind = Kind::Nftables(SERVICES);
const IPTABLES: Kind = Kind::Iptables(SERVICES);

pub(crate) const ESTABLISHED: &str = "wire, established";
pub(crate) const OPENINGS: &str = "wire, new flows, SYN";
pub(crate) const HANDSHAKES: &str = "wire, new flows, handshake";
pub(crate) const LOAD: &str = "wire, CPU at 200 kpps";
pub(crate) const REQUESTS: &str = "wire, request latency";
pub(crate) const CONNECTIONS: &str = "wire, connections";

/// Subjects that each group measures.
pub(crate) struct Plan {
    pub(crate) established: Vec<Kind>,
    pub(crate) openings: Vec<Kind>,
    pub(crate) handshakes: Vec<Kind>,
    pub(crate) load: Vec<Kind>,
    pub(crate) http: Vec<Kind>,
    rows: BTreeSet<(String, String)>,
}

impl Plan {
    /// Makes the plan by querying every row.
    pub(crate) fn of(effort: Effort, report: &mut Report) -> Self {
        let mut rules = vec![Kind::Nftables(1), NFTABLES, Kind::Iptables(1), IPTABLES];
        let mut ours = vec![XDP, TC];
        if effort.full {
            rules.extend([Kind::Nftables(10_000), Kind::Iptables(10_000)]);
            ours.extend([Kind::Xdp(10_000), Kind::Tc(10_000)]);
        }
        let those = |first: &[Kind]| [first, &ours, &[Kind::Router], &rules].concat();
        let mut rows = BTreeSet::new();
        let mut select =
            |group: &str, kinds: Vec<Kind>, references: &[Kind], names: &dyn Fn(Kind) -> Vec<String>| {
                let wanted: Vec<Kind> = kinds
                    .into_iter()
                    .filter(|kind| {
                        let before = rows.len();
                        let names = names(*kind).into_iter().filter(|name| report.wants(group, name));
                        rows.extend(names.map(|name| (group.to_owned(), name)));
                        rows.len() > before
                    })
                    .collect();
                with(wanted, references)
            };
        let one = |kind: Kind| vec![kind.to_string()];
        let established = those(&[Kind::Bounce, Kind::Floor]);
        Self {
            established: select(
                ESTABLISHED,
                established,
                &[Kind::Bounce, Kind::Floor, NFTABLES],
                &established_names,
            ),
            openings: select(OPENINGS, those(&[]), &[NFTABLES], &one),
            handshakes: select(HANDSHAKES, those(&[]), &[NFTABLES], &one),
            load: select(LOAD, those(&[]), &[Kind::Bounce, NFTABLES], &one),
            http: {
                let kinds = vec![XDP, TC, Kind::Router, NFTABLES, IPTABLES];
                let mut wanted = select(REQUESTS, kinds.clone(), &[NFTABLES], &latencies);
                let more = select(CONNECTIONS, kinds, &[NFTABLES], &connections);
                wanted.extend(more.into_iter().filter(|kind| !wanted.contains(kind)).collect::<Vec<_>>());
                wanted
            },
            rows,
        }
    }

    /// Returns the rows that were requested; others were measured only as references.
    pub(crate) fn wanted(&self, mut rows: Vec<Row>) -> Vec<Row> {
        rows.retain(|row| self.rows.contains(&(row.group.clone(), row.name.clone())));
        rows
    }

    /// Records for all rows of a subject why they are missing.
    pub(crate) fn skip(&self, kind: Kind, reason: &str, report: &mut Report) {
        for (group, kinds, names) in [
            (ESTABLISHED, &self.established, established_names(kind)),
            (OPENINGS, &self.openings, vec![kind.to_string()]),
            (HANDSHAKES, &self.handshakes, vec![kind.to_string()]),
            (LOAD, &self.load, vec![kind.to_string()]),
            (REQUESTS, &self.http, latencies(kind)),
            (CONNECTIONS, &self.http, connections(kind)),
        ] {
            for name in names.iter().filter(|_| kinds.contains(&kind)) {
                if self.rows.contains(&(group.to_owned(), name.clone())) {
                    report.skip(group, name, reason);
                }
            }
        }
    }

    /// Returns all subjects that are needed, each once.
    pub(crate) fn kinds(&self) -> Vec<Kind> {
        let mut kinds = Vec::new();
        for kind in [&self.established, &self.openings, &self.handshakes, &self.load, &self.http]
            .into_iter()
            .flatten()
        {
            if !kinds.contains(kind) {
                kinds.push(*kind);
            }
        }
        kinds
    }
}

/// Adds the reference rows that these rows are compared with.
fn with(mut wanted: Vec<Kind>, references: &[Kind]) -> Vec<Kind> {
    if !wanted.is_empty() {
        let more: Vec<_> = references.iter().copied().filter(|kind| !wanted.contains(kind)).collect();
        wanted.extend(more);
    }
    wanted
}

fn established_names(kind: Kind) -> Vec<String> {
    let mut names = vec![kind.to_string(), per_packet(kind)];
    if kind == XDP {
        names.insert(0, by_the_floor(kind));
    }
    names
}

pub(crate) fn by_the_floor(kind: Kind) -> String {
    format!("{kind}, by the floor")
}

pub(crate) fn per_packet(kind: Kind) -> String {
    format!("per packet, {kind}")
}

/// Background load through the node during HTTP requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Background {
    None,
    Half,
}

impl Background {
    pub(crate) const BOTH: [Self; 2] = [Self::None, Self::Half];

    pub(crate) fn name(self, kind: Kind) -> String {
        match self {
            Self::None => kind.to_string(),
            Self::Half => format!("{kind}, at 50 % load"),
        }
    }
}

/// Percentiles: name, fraction, and the spread between runs that is accepted. The last one covers a
/// few requests per run.
pub(crate) const PERCENTILES: [(&str, f64, f64); 3] =
    [("p50", 0.5, 0.1), ("p99", 0.99, 0.3), ("p99.9", 0.999, 2.0)];
pub(crate) const WAYS: [&str; 2] = ["kept connection", "new connection"];

pub(crate) fn latency(way: &str, percentile: &str, background: Background, kind: Kind) -> String {
    format!("{percentile}, {way}, {}", background.name(kind))
}

fn connections(kind: Kind) -> Vec<String> {
    Background::BOTH.map(|background| background.name(kind)).to_vec()
}

fn latencies(kind: Kind) -> Vec<String> {
    let mut names = Vec::new();
    for background in Background::BOTH {
        for way in WAYS {
            names.extend(PERCENTILES.map(|(percentile, ..)| latency(way, percentile, background, kind)));
        }
    }
    names
}
