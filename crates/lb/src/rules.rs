//! Findings about a Service, the worst first.

mod checks;

use std::time::Duration;

use traffic_policy_cluster::model::{Algorithm, DEFAULT_DRAIN, Policy};

use super::{
    balancer::{Ask, Weights},
    cluster::Cluster,
    finding::{Finding, Level},
    fix,
    nodes::Nodes,
    verdict::{Fate, Judgement, Membership, PortJudgement, Row, as_f64},
};

/// The factor over the mean from which a pod's larger share is worth a finding.
const UNEVEN: f64 = 1.25;
const VERY_UNEVEN: f64 = 1.5;

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

    fn nobody(&self) -> Option<Finding> {
        if self.port.ready() == 0 && self.port.pods.is_empty() {
            return Some(Finding::new(
                Level::Error,
                "no-endpoint",
                format!("{} has no endpoint that takes connections: every request is refused", self.name()),
                "let a pod of it become ready",
            ));
        }
        if self.port.healthy() > 0 {
            return None;
        }
        let after = match (self.port.failed_open, self.port.lost) {
            (false, _) => "the balancer sends to nobody".to_owned(),
            (true, lost) => format!(
                "the balancer then sends to all of them, and {} of the requests are lost",
                percent(lost)
            ),
        };
        Some(Finding::new(
            Level::Error,
            "nobody-healthy",
            format!("no node is healthy for the balancer of {}: {after}", self.name()),
            "see the column TOLD: a pod must be ready on a node that the balancer knows",
        ))
    }

    /// Reports nodes that are healthy, but where requests are not answered.
    fn answers_nothing(&self) -> Option<Finding> {
        let bad = |row: &Row<'_>| row.takes && !matches!(row.fate, Fate::Served { .. });
        let (count, share) = self.port.sum(bad);
        if count == 0 || self.port.failed_open || self.port.pods.is_empty() {
            return None;
        }
        let dropped = self.port.sum(|row| bad(row) && row.fate == Fate::Dropped).0 > 0;
        let how = if dropped { "dropped" } else { "refused" };
        let name = self.name();
        let what = format!(
            "{} is sent {} of the requests of {name}, which are {how} there",
            self.nodes(bad),
            percent(share)
        );
        let finding = |fix: &str| Finding::new(Level::Error, "healthy-and-lost", what, fix);
        Some(match self.judgement.policy {
            Policy::Cluster => finding("let a pod of it become ready"),
            Policy::Local if self.is_node_port() => finding(&format!(
                "give it a health port and let the balancer ask there, or set externalTrafficPolicy: Cluster{}",
                self.keeps_client()
            ))
            .with_yaml(self.health_port_yaml()),
            Policy::Local => finding(&format!(
                "let the balancer ask the healthCheckNodePort, or set externalTrafficPolicy: Cluster{}",
                self.keeps_client()
            )),
        })
    }

    /// Adds to the advice of policy Cluster what keeps the client's address there, as Local does.
    fn keeps_client(&self) -> &'static str {
        match self.judgement.balancer.proxies.value {
            true => "",
            false if self.judgement.is_direct() => match self.judgement.service.forwarding {
                Some(_) => {
                    " (its annotation traffic-policy.io/forwarding: direct then keeps the client's address)"
                }
                None => " (the agents' --forwarding direct then keeps the client's address)",
            },
            false => {
                " (with the annotation traffic-policy.io/forwarding: direct, which keeps the client's address)"
            }
        }
    }

    fn healthy_without_pod(&self) -> Option<Finding> {
        let bad = |row: &Row<'_>| row.takes && matches!(row.fate, Fate::Served { here: 0, .. });
        let (count, share) = self.port.sum(bad);
        if count == 0 || self.port.failed_open {
            return None;
        }
        let preemptible = self.port.sum(|row| bad(row) && row.kind.preemptible).0;
        let risk = match preemptible {
            _ if self.judgement.outlives_nodes() => {
                "each is forwarded; open connections go on through another node if that node goes".to_owned()
            }
            0 => "each is forwarded, and dies if that node goes".to_owned(),
            n if n == count => {
                "each is forwarded, and dies with that node, which the cloud may take away at any time"
                    .to_owned()
            }
            n => format!(
                "each is forwarded, and dies if that node goes; {n} of them the cloud may take away at any time"
            ),
        };
        let name = self.name();
        let outlives = self.judgement.outlives_nodes();
        let finding = Finding::new(
            if outlives { Level::Note } else { Level::Warning },
            "healthy-without-pod",
            format!(
                "{} healthy without a pod of {name} and {} {} of its requests: {risk}",
                if count == 1 {
                    format!("{} is", self.nodes(bad))
                } else {
                    format!("{} are", self.nodes(bad))
                },
                if count == 1 { "gets" } else { "get" },
                percent(share)
            ),
            match self.judgement.policy {
                Policy::Cluster if outlives => {
                    format!("nothing has to be; `lb simulate {name} --event '5s node=NAME=gone'` shows it")
                }
                Policy::Cluster => {
                    let other = match self.judgement.balancer.moves_address(Policy::Cluster) {
                        true => {
                            "; or the annotations traffic-policy.io/forwarding: direct and \
                             traffic-policy.io/algorithm: maglev, with which open connections go on through another node"
                        }
                        false => "",
                    };
                    format!(
                        "externalTrafficPolicy: Local; `lb what-if {name} --policy Local` says what that does{other}"
                    )
                }
                Policy::Local => {
                    "let the balancer ask the health port, which says 503 on such a node: the fallback is then for what still comes".to_owned()
                }
            },
        );
        let lacks_port = self.judgement.policy == Policy::Local && self.is_node_port();
        Some(if lacks_port { finding.with_yaml(self.health_port_yaml()) } else { finding })
    }

    fn unhealthy_with_pod(&self) -> Option<Finding> {
        let bad = |row: &Row<'_>| row.pods > 0 && !row.takes;
        let (count, _) = self.port.sum(bad);
        // Another finding reports that no node is healthy.
        if count == 0 || self.port.healthy() == 0 {
            return None;
        }
        let pods: usize = self.port.rows.iter().filter(|row| bad(row)).map(|row| row.pods * row.count).sum();
        let level = match self.judgement.policy {
            Policy::Local => Level::Warning,
            Policy::Cluster => Level::Note,
        };
        let excluded = self.port.sum(|row| bad(row) && row.membership == Membership::Excluded).0 > 0;
        let fix = if excluded {
            "take the label node.kubernetes.io/exclude-from-external-load-balancers off the node, or keep these pods away from it"
        } else {
            "see --why for what keeps the node out"
        };
        Some(Finding::new(
            level,
            "unhealthy-with-pod",
            format!(
                "{} gets no traffic although {} of {} there",
                self.nodes(bad),
                counted(pods, "pod is ready", "pods are ready"),
                self.name()
            ),
            fix,
        ))
    }

    fn on_one_node(&self) -> Option<Finding> {
        let ready = || self.port.pods.iter().filter(|pod| pod.ready);
        let node = ready().next()?.node?;
        if self.nodes.count() < 2 || ready().any(|pod| pod.node != Some(node)) {
            return None;
        }
        let name = self.name();
        let (level, what) = match ready().count() {
            1 => {
                (Level::Note, format!("the only pod of {name} is on node {node}: it is gone with that node"))
            }
            n => (
                Level::Warning,
                format!("all {n} pods of {name} are on node {node}: they are gone with that node"),
            ),
        };
        let yaml = fix::spread(self.judgement.service);
        Some(Finding::new(level, "one-node", what, "spread the pods over nodes").with_yaml(yaml))
    }

    fn uneven(&self) -> Option<Finding> {
        let Judgement { service, treatment, .. } = self.judgement;
        if treatment.algorithm == Algorithm::Maglev && service.weights != Default::default() {
            // Its annotation wants it so.
            return None;
        }
        let skew = self.port.skew().filter(|skew| *skew >= UNEVEN)?;
        let most = self.port.pods.iter().max_by(|a, b| a.share.total_cmp(&b.share))?;
        let mean = 1.0 / as_f64(self.port.ready().max(1));
        let level = if skew >= VERY_UNEVEN { Level::Warning } else { Level::Note };
        let weights = match self.judgement.balancer.weights.value {
            Weights::Annotated(name, value) if self.judgement.policy == Policy::Local => {
                format!("; or let the balancer weigh: annotation {name}: {value}")
            }
            _ => String::new(),
        };
        let cluster = match self.judgement.policy {
            Policy::Local => format!("; or externalTrafficPolicy: Cluster{}", self.keeps_client()),
            Policy::Cluster => String::new(),
        };
        let what = format!(
            "{} of {} gets {} of the requests, {skew:.2} times the mean of {}",
            most.label(),
            self.name(),
            percent(most.share),
            percent(mean)
        );
        let yaml = fix::spread(self.judgement.service);
        Some(
            Finding::new(level, "uneven", what, format!("as many pods on each node{weights}{cluster}"))
                .with_yaml(yaml),
        )
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

/// Formats a share.
fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

fn counted(count: usize, one: &str, many: &str) -> String {
    if count == 1 { format!("1 {one}") } else { format!("{count} {many}") }
}

/// Formats a time for an annotation.
pub(super) fn span(time: Duration) -> String {
    match time.as_millis() % 1000 {
        0 => format!("{}s", time.as_secs()),
        _ => format!("{}ms", time.as_millis()),
    }
}
