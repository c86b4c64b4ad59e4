//! Load balancers: the health checks that they send to nodes, and the time until they act on the
//! answers.

use std::time::Duration;

use traffic_policy_cluster::model::{Algorithm, Policy, object::Service};

use super::cluster::Agents;

/// A fact about a balancer, and whether it was found in its source or documentation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fact<T> {
    pub value: T,
    /// Whether the fact was found there; otherwise it is an assumption, and marked as such wherever
    /// it is shown.
    pub sure: bool,
}

pub(super) const fn sure<T>(value: T) -> Fact<T> {
    Fact { value, sure: true }
}

pub(super) const fn unsure<T>(value: T) -> Fact<T> {
    Fact { value, sure: false }
}

/// The target of a health check on a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ask {
    /// `/healthz` on port 10256: whether the proxy of the node works.
    ProxyHealth,
    /// The health port of the Service, from `healthCheckNodePort` or an annotation; the traffic
    /// port if there is none.
    ServiceHealth,
    /// Whether the node port, or the port of an external IP, accepts a connection.
    TrafficPort,
    /// Nothing: a speaker on the node announces the Service according to its endpoints.
    Nothing,
}

/// The health check of nodes under one policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Check {
    pub ask: Fact<Ask>,
    pub interval: Fact<Duration>,
    /// The time limit for an answer.
    pub timeout: Fact<Duration>,
    /// The number of consecutive failures until a node gets no traffic.
    pub failures: Fact<u32>,
    /// The number of consecutive successes until a node gets traffic.
    pub successes: Fact<u32>,
}

/// Whether nodes with more pods get more traffic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Weights {
    Never,
    /// According to the header in the health port's answer.
    Always,
    /// If the Service has this annotation, given as key and value.
    Annotated(&'static str, &'static str),
}

/// The properties of a load balancer that determine which node gets which traffic, and when.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Balancer {
    pub name: &'static str,
    pub cluster: Check,
    pub local: Check,
    /// Whether all nodes get traffic while none is healthy.
    pub fail_open: Fact<bool>,
    pub weights: Fact<Weights>,
    /// Whether one node at a time gets all traffic.
    pub one_node: bool,
    /// The time until its controller has propagated a change of the Service or of the set of nodes.
    pub controller: Fact<Duration>,
    /// The time that it still sends to a node that vanished, where nodes are not checked.
    pub vanished: Fact<Duration>,
    /// Whether it terminates the client's connection and opens one of its own: the node sees the
    /// balancer's address.
    pub proxies: Fact<bool>,
    /// Whether connections through a node are cut when it turns unhealthy.
    pub cuts: Fact<bool>,
    /// Whether a router spreads connections over the nodes by a hash that moves those of all nodes
    /// when their number changes.
    pub rehashes: Fact<bool>,
}

impl Balancer {
    #[must_use]
    pub const fn check(&self, policy: Policy) -> &Check {
        match policy {
            Policy::Cluster => &self.cluster,
            Policy::Local => &self.local,
        }
    }

    /// Whether connections of a Service go on through another node when the node in front is gone,
    /// or no longer gets them: every node finds their pods, and the address that they were opened
    /// to moves. With session affinity a pod need not be that of the table, and another node does
    /// not know which it is. `treatment`: that of the Service by agents.
    #[must_use]
    pub fn outlives_nodes(&self, service: &Service, treatment: Agents, policy: Policy) -> bool {
        treatment.forwarding.is_direct()
            && treatment.algorithm == Algorithm::Maglev
            && service.affinity.is_none()
            && policy == Policy::Cluster
            && self.moves_address(policy)
    }

    /// Whether speakers on the nodes move the address that connections were opened to.
    #[must_use]
    pub fn moves_address(&self, policy: Policy) -> bool {
        self.check(policy).ask.value == Ask::Nothing && !self.proxies.value
    }

    /// Returns the longest time that it sends to a node whose health check fails.
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

    /// Returns the longest time that it sends to a node that does not answer.
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

    /// Returns the time for which a node without an endpoint must keep forwarding after a change to
    /// policy Local: the check moves to the health port, and has to fail there as often as the
    /// balancer requires.
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
