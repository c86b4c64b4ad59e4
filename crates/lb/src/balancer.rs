//! Load balancers: their questions to nodes, and when they believe the answers.

use std::time::Duration;

use traffic_policy_cluster::model::Policy;

/// Something that is said of a balancer, and whether it was found in its source or documentation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fact<T> {
    pub value: T,
    /// Otherwise it is an assumption, and marked as such wherever it is shown.
    pub sure: bool,
}

pub(super) const fn sure<T>(value: T) -> Fact<T> {
    Fact { value, sure: true }
}

pub(super) const fn unsure<T>(value: T) -> Fact<T> {
    Fact { value, sure: false }
}

/// Health-check target on a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ask {
    /// `/healthz` on port 10256: whether the proxy of the node works.
    ProxyHealth,
    /// The health port of the Service, `healthCheckNodePort` or an annotation's; the traffic port where it has none.
    ServiceHealth,
    /// Whether the node port, or the port of an external IP, takes a connection.
    TrafficPort,
    /// Nothing: a speaker on the node announces it, as endpoints come and go.
    Nothing,
}

/// Health check of nodes under one policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Check {
    pub ask: Fact<Ask>,
    pub interval: Fact<Duration>,
    /// For an answer.
    pub timeout: Fact<Duration>,
    /// Failures in a row until it gets no traffic.
    pub failures: Fact<u32>,
    /// Successes in a row until it gets traffic.
    pub successes: Fact<u32>,
}

/// Whether nodes with more pods get more traffic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Weights {
    Never,
    /// By the header that the health port answers with.
    Always,
    /// If the Service has this annotation.
    Annotated(&'static str, &'static str),
}

/// A load balancer as far as it matters to which node gets what, and when.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Balancer {
    pub name: &'static str,
    pub cluster: Check,
    pub local: Check,
    /// Whether all nodes get traffic while none is healthy.
    pub fail_open: Fact<bool>,
    pub weights: Fact<Weights>,
    /// One node at a time gets everything.
    pub one_node: bool,
    /// Time until its controller has passed on a change of the Service or of the set of nodes.
    pub controller: Fact<Duration>,
    /// Time that it still sends to a node that vanished, where nodes are not checked.
    pub vanished: Fact<Duration>,
    /// It ends the client's connection and makes one of its own: the node sees the balancer's address.
    pub proxies: Fact<bool>,
    /// Connections by a node are cut when it turns unhealthy.
    pub cuts: Fact<bool>,
}

impl Balancer {
    #[must_use]
    pub const fn check(&self, policy: Policy) -> &Check {
        match policy {
            Policy::Cluster => &self.cluster,
            Policy::Local => &self.local,
        }
    }

    /// Longest time that it sends to a node whose health check fails.
    #[must_use]
    pub fn notices_refusal(&self, policy: Policy) -> Fact<Duration> {
        let check = self.check(policy);
        match check.ask.value {
            Ask::Nothing => self.controller,
            _ => Fact {
                value: check.interval.value * check.failures.value,
                sure: check.interval.sure && check.failures.sure,
            },
        }
    }

    /// Longest time that it sends to a node that does not answer.
    #[must_use]
    pub fn notices_silence(&self, policy: Policy) -> Fact<Duration> {
        let check = self.check(policy);
        match check.ask.value {
            Ask::Nothing => self.vanished,
            _ => {
                let told = self.notices_refusal(policy);
                Fact { value: told.value + check.timeout.value, sure: told.sure && check.timeout.sure }
            }
        }
    }

    /// Time for which a node without an endpoint must go on forwarding after a change to policy Local: the check is moved to
    /// the health port, and has to fail there as often as the balancer requires.
    #[must_use]
    pub fn drain(&self) -> Fact<Duration> {
        let told = self.notices_refusal(Policy::Local);
        match self.local.ask.value {
            Ask::Nothing => told,
            _ => Fact {
                value: told.value + self.controller.value + self.local.timeout.value,
                sure: told.sure && self.controller.sure && self.local.timeout.sure,
            },
        }
    }
}
