//! Findings about where requests go: nodes that get some and should not, nodes that should and get
//! none, and pods whose shares differ.

use traffic_policy_cluster::model::{Algorithm, Policy};

use super::Case;
use crate::{
    balancer::Weights,
    finding::{Finding, Level},
    fix,
    verdict::{Fate, Judgement, Membership, Row, as_f64},
};

/// The factor over the mean from which a pod's larger share is worth a finding.
const UNEVEN: f64 = 1.25;
const VERY_UNEVEN: f64 = 1.5;

impl Case<'_, '_> {
    pub(super) fn nobody(&self) -> Option<Finding> {
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
    pub(super) fn answers_nothing(&self) -> Option<Finding> {
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

    pub(super) fn healthy_without_pod(&self) -> Option<Finding> {
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

    pub(super) fn unhealthy_with_pod(&self) -> Option<Finding> {
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

    pub(super) fn on_one_node(&self) -> Option<Finding> {
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

    pub(super) fn uneven(&self) -> Option<Finding> {
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
}

/// Formats a share.
fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

fn counted(count: usize, one: &str, many: &str) -> String {
    if count == 1 { format!("1 {one}") } else { format!("{count} {many}") }
}
