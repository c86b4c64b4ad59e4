//! The judgement of a Service: nodes, pods, and findings.

use std::net::SocketAddr;

use traffic_policy_cluster::model::{Frontend, Policy, Protocol, ServicePortKey, object::Service};

use super::{
    balancer::Balancer,
    cluster::Agents,
    finding::Finding,
    nodes::{Kind, Nodes, Who},
};

/// The health check that a balancer makes on nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Question {
    ProxyHealth,
    ServiceHealth(u16),
    TrafficPort(u16),
    Nothing,
}

/// The answer of a node, if an agent or kube-proxy works there and nothing blocks the path to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// Status 200; a health port of a Service gives a number of endpoints.
    Ok(Option<usize>),
    Unavailable,
    Open,
    Refused,
    Silence,
    Announced,
    NotAnnounced,
}

impl Answer {
    #[must_use]
    pub const fn is_healthy(self) -> bool {
        matches!(self, Self::Ok(_) | Self::Open | Self::Announced)
    }
}

/// Whether a balancer knows a node at all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Membership {
    Member,
    /// The Node has the label `node.kubernetes.io/exclude-from-external-load-balancers`.
    Excluded,
    /// There is no such Node.
    NoNode,
}

/// The outcome of a client's new connection or first datagram at a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// Sent to one of `of` endpoints, of which `here` are on the node. Traffic to the others is
    /// forwarded, with the node's address as its source. Under policy Local `here` is 0 only where
    /// the Service's annotation makes the node forward.
    Served { here: usize, of: usize },
    /// Dropped silently: policy Local, and endpoints on other nodes only.
    Dropped,
    /// Rejected with an ICMP error: no endpoint anywhere.
    Refused,
}

/// One node, or several nodes with the same properties.
#[derive(Clone, Debug, PartialEq)]
pub struct Row<'a> {
    pub who: Who<'a>,
    pub count: usize,
    pub kind: Kind<'a>,
    /// The number of ready endpoints on each.
    pub pods: usize,
    pub membership: Membership,
    pub answer: Answer,
    pub fate: Fate,
    /// Whether the balancer sends to it.
    pub takes: bool,
    /// The share of all requests that the nodes of the row get together.
    pub share: f64,
}

impl Row<'_> {
    pub(super) const fn is_healthy(&self) -> bool {
        matches!(self.membership, Membership::Member) && self.answer.is_healthy()
    }
}

/// An endpoint and its share.
#[derive(Clone, Debug, PartialEq)]
pub struct PodShare<'a> {
    /// Its address for each of the ports.
    pub addresses: Vec<SocketAddr>,
    pub pod: Option<&'a str>,
    pub node: Option<&'a str>,
    pub ready: bool,
    /// Its share of all requests.
    pub share: f64,
}

impl PodShare<'_> {
    /// Returns the pod's name, or the address if the name is not known.
    #[must_use]
    pub fn label(&self) -> String {
        let address = || self.addresses.first().map(|address| address.ip().to_string()).unwrap_or_default();
        self.pod.map_or_else(address, str::to_owned)
    }
}

/// Service ports with the same properties.
#[derive(Clone, Debug)]
pub struct PortJudgement<'a> {
    pub keys: Vec<ServicePortKey>,
    pub frontends: Vec<Frontend>,
    pub question: Question,
    /// The rows: nodes with endpoints first, by name; then the others.
    pub rows: Vec<Row<'a>>,
    pub pods: Vec<PodShare<'a>>,
    /// Whether no node is healthy, and all get traffic for that reason.
    pub failed_open: bool,
    /// The share of all requests that get no answer.
    pub lost: f64,
}

impl<'a> PortJudgement<'a> {
    /// Returns the names of the nodes of a row, at most `most`.
    pub(super) fn names(&self, nodes: &Nodes<'a>, row: &Row<'a>, most: usize) -> Vec<&'a str> {
        match row.who {
            Who::Node(name) => vec![name],
            Who::Others(class) => {
                let special = self.rows.iter().filter_map(|row| match row.who {
                    Who::Node(name) => Some(name),
                    Who::Others(_) => None,
                });
                nodes.names(class, &special.collect(), most)
            }
        }
    }

    /// Returns the largest share of a pod over the mean of all ready ones; `None` if no requests
    /// arrive.
    #[must_use]
    pub fn skew(&self) -> Option<f64> {
        let counted = || self.pods.iter().filter(|pod| pod.ready || pod.share > 0.0);
        let total: f64 = counted().map(|pod| pod.share).sum();
        let largest = counted().map(|pod| pod.share).fold(0.0, f64::max);
        (total > 0.0).then(|| largest * as_f64(counted().count()) / total)
    }

    pub(super) fn sum(&self, which: impl Fn(&Row<'_>) -> bool) -> (usize, f64) {
        let rows = self.rows.iter().filter(|row| which(row));
        rows.fold((0, 0.0), |(count, share), row| (count + row.count, share + row.share))
    }

    #[must_use]
    pub fn healthy(&self) -> usize {
        self.rows.iter().filter(|row| row.is_healthy()).map(|row| row.count).sum()
    }

    #[must_use]
    pub fn taking(&self) -> usize {
        self.sum(|row| row.takes).0
    }

    #[must_use]
    pub fn nodes(&self) -> usize {
        self.rows.iter().map(|row| row.count).sum()
    }

    #[must_use]
    pub fn ready(&self) -> usize {
        self.pods.iter().filter(|pod| pod.ready).count()
    }

    /// Whether two ports have the same properties, apart from their numbers.
    pub(super) fn is_like(&self, other: &Self) -> bool {
        let kind = std::mem::discriminant::<Question>;
        let pods = |port: &Self| -> Vec<_> {
            port.pods
                .iter()
                .map(|pod| (pod.label(), pod.node.map(str::to_owned), pod.ready, pod.share.to_bits()))
                .collect()
        };
        kind(&self.question) == kind(&other.question) && self.rows == other.rows && pods(self) == pods(other)
    }
}

/// One Service behind a balancer.
#[derive(Clone, Debug)]
pub struct Judgement<'a> {
    pub service: &'a Service,
    pub policy: Policy,
    /// The treatment of the Service by agents.
    pub treatment: Agents,
    /// Nodes with pods of it that open no packets, although it is forwarded directly: their pods
    /// get them by SNAT.
    pub by_snat: Vec<&'a str>,
    pub balancer: Balancer,
    /// The reason for assuming this balancer.
    pub why_balancer: String,
    pub ports: Vec<PortJudgement<'a>>,
    /// The findings, the worst first.
    pub findings: Vec<Finding>,
    /// The amount of work: nodes and classes of nodes, and endpoints in lists.
    pub work: usize,
}

impl Judgement<'_> {
    /// Whether packets reach pods of all other nodes unchanged, by the Service's annotation or by
    /// what agents run with. Nodes are taken to open them unless it is known which have Leases.
    #[must_use]
    pub fn is_direct(&self) -> bool {
        self.treatment.forwarding.is_direct() && self.by_snat.is_empty()
    }

    /// Whether connections go on through another node when the node in front dies: every node finds
    /// their pods, and the balancer moves the address that they were opened to.
    #[must_use]
    pub fn outlives_nodes(&self) -> bool {
        // No other node finds an association of SCTP by the table.
        let mut keys = self.ports.iter().flat_map(|port| &port.keys);
        self.by_snat.is_empty()
            && keys.all(|key| key.protocol != Protocol::Sctp)
            && self.balancer.outlives_nodes(self.service, self.treatment, self.policy)
    }
}

pub(super) const fn as_f64(count: usize) -> f64 {
    count as f64
}
