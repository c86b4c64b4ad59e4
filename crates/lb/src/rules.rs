//! Findings about a Service, the worst first.

mod checks;
mod requests;

use std::time::Duration;

use traffic_policy_cluster::model::{DEFAULT_DRAIN, Policy};

use super::{
    balancer::Ask,
    cluster::Cluster,
    finding::{Finding, Level},
    fix,
    nodes::Nodes,
    verdict::{Fate, Judgement, PortJudgement, Row},
};

pub(super) fn findings<'a>(
    cluster: &Cluster,
    nodes: &Nodes<'a>,
    judgement: &Judgement<'a>,
    warnings: impl Iterator<Item = impl AsRef<str>>,
) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (at, port) in judgement.ports.iter().enumerate() {
        let case = Case { cluster, nodes, judgement, port };
        let found = [
            case.nobody(),
            case.answers_nothing(),
            case.healthy_without_pod(),
            case.unhealthy_with_pod(),
            case.times_out(),
            case.assumed_to_ask(),
            case.on_one_node(),
            case.uneven(),
            case.client_address(),
            case.opens_nothing(),
            case.leaving(),
            case.not_ready(),
        ];
        // A finding that a second port shares with the first is reported once.
        for finding in found.into_iter().flatten() {
            if at == 0 || findings.iter().all(|other: &Finding| other.code != finding.code) {
                findings.push(finding);
            }
        }
    }
    if let Some(port) = judgement.ports.first() {
        let case = Case { cluster, nodes, judgement, port };
        findings.extend(case.drain());
        findings.extend(case.no_health_port());
        findings.extend(case.one_node_at_a_time());
    }
    for warning in warnings {
        findings.push(Finding::new(
            Level::Warning,
            "object",
            warning.as_ref().to_owned(),
            "correct the object; until then that part of it is left out",
        ));
    }
    findings.sort_by_key(|finding| finding.level);
    findings
}

/// A Service port, and what is known about its surroundings.
struct Case<'c, 'a> {
    cluster: &'c Cluster,
    nodes: &'c Nodes<'a>,
    judgement: &'c Judgement<'a>,
    port: &'c PortJudgement<'a>,
}

impl<'a> Case<'_, 'a> {
    fn name(&self) -> String {
        self.judgement.service.name.to_string()
    }

    /// Formats a number of nodes with some of their names: `3 nodes (a, b, c)`.
    fn nodes(&self, which: impl Fn(&Row<'a>) -> bool) -> String {
        const MOST: usize = 3;
        let rows: Vec<_> = self.port.rows.iter().filter(|row| which(row)).collect();
        let count: usize = rows.iter().map(|row| row.count).sum();
        let mut names = Vec::new();
        for row in rows {
            if names.len() < MOST {
                names.extend(self.port.names(self.nodes, row, MOST - names.len()));
            }
        }
        match (count, names.as_slice()) {
            (1, [name]) => format!("node {name}"),
            (_, names) if count > names.len() => {
                format!("{count} nodes ({}, …)", names.join(", "))
            }
            (_, names) => format!("{count} nodes ({})", names.join(", ")),
        }
    }

    fn client_address(&self) -> Option<Finding> {
        let service = self.judgement.service;
        if service.source_ranges.is_empty() {
            return None;
        }
        if self.judgement.balancer.proxies.value {
            return Some(Finding::new(
                Level::Warning,
                "source-ranges-see-the-balancer",
                format!(
                    "{} has loadBalancerSourceRanges, but its balancer makes connections of its own: nodes see the balancer's address, \
                     and not the client's",
                    self.name()
                ),
                "let the balancer itself judge sources, or use one that passes packets through",
            ));
        }
        if self.judgement.is_direct() {
            return None;
        }
        let forwarded =
            |row: &Row<'_>| row.takes && matches!(row.fate, Fate::Served { here, of } if here < of);
        (self.port.sum(forwarded).0 > 0).then(|| {
            Finding::new(
                Level::Note,
                "client-address",
                format!(
                    "{} has loadBalancerSourceRanges, which hold at the node that a request comes to; its pods see that node's \
                     address wherever it is forwarded, and cannot judge the client themselves",
                    self.name()
                ),
                match self.judgement.policy {
                    Policy::Cluster => {
                        "externalTrafficPolicy: Local keeps the client's address, and so does the annotation traffic-policy.io/forwarding: direct"
                    }
                    Policy::Local => "without traffic-policy.io/external-fallback the client's address is kept, and nothing is forwarded",
                },
            )
        })
    }

    /// Reports nodes that are to open packets and do not.
    fn opens_nothing(&self) -> Option<Finding> {
        let Judgement { by_snat, .. } = self.judgement;
        let first = by_snat.first()?;
        let (who, open) = match by_snat.as_slice() {
            [node] => (format!("node {node}"), "opens"),
            nodes => (format!("{} nodes ({first}, …)", nodes.len()), "open"),
        };
        Some(Finding::new(
            Level::Warning,
            "opens-nothing",
            format!(
                "{} is forwarded directly, but {who} {open} no packets, by the Leases: pods there get them by SNAT, and see the node \
                 that a request comes to",
                self.name()
            ),
            format!(
                "--announce-opening for every agent; `kubectl traffic-policy status {first}` says in its line direct why a node opens nothing"
            ),
        ))
    }

    fn leaving(&self) -> Option<Finding> {
        let leaving = |row: &Row<'_>| row.kind.leaving && (row.takes || row.pods > 0);
        if self.port.sum(leaving).0 == 0 {
            return None;
        }
        Some(Finding::new(
            Level::Note,
            "leaving",
            format!(
                "{} is being deleted or has the taint ToBeDeletedByClusterAutoscaler: its requests and pods move to others",
                self.nodes(leaving)
            ),
            "nothing, if others have pods; see `lb what-if --node NAME=drained`",
        ))
    }

    fn not_ready(&self) -> Option<Finding> {
        use traffic_policy_cluster::model::object::Readiness;
        let silent = |row: &Row<'_>| row.kind.readiness == Readiness::Unknown;
        if self.port.sum(silent).0 == 0 {
            return None;
        }
        Some(Finding::new(
            Level::Note,
            "silent-node",
            format!("the kubelet of {} is not heard of: its checks are taken to fail", self.nodes(silent)),
            "see `kubectl describe node`",
        ))
    }

    /// Reports whether a change to policy Local would lose requests.
    fn drain(&self) -> Option<Finding> {
        let service = self.judgement.service;
        let node_port_only = self.is_node_port() && service.health_annotation == 0;
        if self.judgement.policy != Policy::Cluster || node_port_only {
            return None;
        }
        let balancer = &self.judgement.balancer;
        if balancer.local.ask.value == Ask::TrafficPort {
            return None;
        }
        let needed = balancer.drain();
        let drain = service.drain.unwrap_or(DEFAULT_DRAIN);
        if drain >= needed.value {
            return None;
        }
        let from = if service.drain.is_some() { "its annotation" } else { "the agent's default" };
        let level = if service.drain.is_some() { Level::Warning } else { Level::Note };
        let about = if needed.sure { "" } else { "about " };
        let text = span(needed.value);
        Some(
            Finding::new(
                level,
                "short-drain",
                format!(
                    "a change of {} to policy Local would be believed by {} after up to {about}{text}; nodes without a pod forward for \
                     {} ({from})",
                    self.name(),
                    balancer.name,
                    span(drain)
                ),
                format!("before such a change, the annotation traffic-policy.io/drain: {text}"),
            )
            .with_yaml(fix::annotation("traffic-policy.io/drain", &text)),
        )
    }

    fn one_node_at_a_time(&self) -> Option<Finding> {
        (self.judgement.balancer.one_node && self.port.taking() > 1).then(|| {
            Finding::new(
                Level::Note,
                "one-node-at-a-time",
                format!(
                    "{} sends everything to one node at a time: the shares of nodes are chances to be that node",
                    self.judgement.balancer.name
                ),
                "",
            )
        })
    }
}

/// Formats a time for an annotation.
pub(super) fn span(time: Duration) -> String {
    match time.as_millis() % 1000 {
        0 => format!("{}s", time.as_secs()),
        _ => format!("{}ms", time.as_millis()),
    }
}
