//! The desired state: [`crate::model`] produces it, and the data plane consumes it.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use super::{Algorithm, Dispatch, Excess, Forwarding, Policy, Protocol, ServiceName, ServicePortKey};

/// An address on which a Service port is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Frontend {
    pub address: SocketAddr,
    pub kind: FrontendKind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum FrontendKind {
    ClusterIp,
    NodePort,
    LoadBalancer,
    ExternalIp,
    /// A node port on the node's loopback addresses, for sockets of the node's own network
    /// namespace only. Its address is the unspecified one of the family and stands for 127.0.0.0/8
    /// or `::1`. It also stands for the node port at the addresses of other nodes, for packets that
    /// these have forwarded directly to this one.
    LoopbackNodePort,
    /// The same where the node itself does not reach node ports on loopback: for packets that
    /// another node has forwarded directly alone.
    OpenedNodePort,
}

impl FrontendKind {
    /// Whether it is a node port, whose addresses are other ones on each node.
    #[must_use]
    pub const fn is_node_port(self) -> bool {
        matches!(self, Self::NodePort | Self::LoopbackNodePort | Self::OpenedNodePort)
    }
}

/// An endpoint chosen for a list. Endpoints are ordered by their address as a string, as in
/// kube-proxy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Endpoint {
    pub address: SocketAddr,
    /// Whether its `nodeName` is this node.
    pub local: bool,
    /// Whether its `nodeName` is another node.
    pub remote: bool,
    /// The way of what is forwarded directly to that other node; `None`: it opens no packets.
    pub opens: Option<Dispatch>,
    /// The way of connections that go on to that other node, while new ones are not forwarded
    /// directly yet.
    pub held: Option<Dispatch>,
    /// The number of that other node in [`NodeNumbers`][super::NodeNumbers]; 0: it has none.
    pub node: u16,
    /// The endpoint's weight in a Maglev table.
    pub weight: u16,
}

impl Endpoint {
    /// Returns an endpoint on this node, or on one of which nothing is known.
    #[must_use]
    pub const fn new(address: SocketAddr, local: bool) -> Self {
        Self { address, local, remote: false, opens: None, held: None, node: 0, weight: 1 }
    }
}

/// The annotation that, under policy Local, lets nodes without an endpoint forward external traffic
/// as under policy Cluster.
pub const FALLBACK_ANNOTATION: &str = "traffic-policy.io/external-fallback";

/// Desired content of the maps for one Service port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServicePort {
    pub frontends: BTreeSet<Frontend>,
    pub external_policy: Policy,
    /// Whether, under external policy Local, external traffic is forwarded as under Cluster while
    /// this node has no endpoint.
    pub external_fallback: bool,
    pub internal_policy: Policy,
    /// Endpoints for policy Cluster.
    pub cluster: Vec<Endpoint>,
    /// Endpoints for policy Local; empty if neither policy is Local.
    pub local: Vec<Endpoint>,
    /// Whether any endpoint, on any node, can take new connections; without one, new connections
    /// are rejected.
    pub has_endpoints: bool,
    /// Endpoints that existing flows may keep (serving, whether terminating or not; UDP: without
    /// those of silent nodes).
    pub serving: BTreeSet<SocketAddr>,
    /// Time for which new external flows are still forwarded to other nodes after a change from
    /// Cluster to Local, if the Service's annotation sets it; otherwise the agent's `--drain`
    /// applies.
    pub drain: Option<Duration>,
    /// `loadBalancerSourceRanges` of this family; empty: every source. Applies to frontends of kind
    /// LoadBalancer only.
    pub source_ranges: Vec<ipnet::IpNet>,
    /// The time-out of `sessionAffinity: ClientIP`, if set.
    pub affinity: Option<Duration>,
    pub forwarding: Forwarding,
    /// The endpoints on this node in any condition, for which packets are opened; empty if no other
    /// node forwards directly.
    pub here: BTreeSet<SocketAddr>,
    /// The choice among the endpoints for policy Cluster, for connections from outside.
    pub algorithm: Algorithm,
}

impl ServicePort {
    /// Returns the policy that applies to external traffic on this node now.
    #[must_use]
    pub fn external_policy_here(&self) -> Policy {
        if self.external_fallback && self.local.is_empty() { Policy::Cluster } else { self.external_policy }
    }

    /// Returns the policy that applies to a frontend of this kind on this node now.
    #[must_use]
    pub fn policy_here(&self, kind: FrontendKind) -> Policy {
        if kind == FrontendKind::ClusterIp { self.internal_policy } else { self.external_policy_here() }
    }

    /// Whether two nodes with the same Maglev table find the same endpoint for a packet to a
    /// frontend of this kind, so that it need not be named. Each node has node ports at addresses
    /// of its own, and remembers clients of its own.
    #[must_use]
    pub fn is_alike_everywhere(&self, kind: FrontendKind) -> bool {
        self.forwarding == Forwarding::Direct
            && self.policy_here(kind) == Policy::Cluster
            && self.affinity.is_none()
            && !kind.is_node_port()
    }
}

/// A Service whose health port this node serves: its `healthCheckNodePort`, or that of its
/// annotation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HealthCheck {
    pub port: u16,
    /// The number of distinct addresses of ready endpoints on this node, over all ports of the
    /// Service, in the family that has more of them (a dual-stack pod counts once).
    pub local_endpoints: usize,
    /// The load balancer's addresses: balancers that forward packets without translation send their
    /// probes to these, with the node's MAC.
    pub load_balancer_ips: BTreeSet<IpAddr>,
}

/// Everything that the data plane and the health servers need.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Desired {
    /// Shared with the record of what is in the maps, because a large cluster has many.
    pub ports: BTreeMap<ServicePortKey, Arc<ServicePort>>,
    /// Services without any entry in `ports`, since they ask for more than the maps can hold.
    pub refused: BTreeMap<ServiceName, Excess>,
    pub health: BTreeMap<ServiceName, HealthCheck>,
    /// Whether this node's Node object lets load balancers send to it (semantics of `/healthz`): it
    /// is known, not being deleted, and without the taint `ToBeDeletedByClusterAutoscaler`.
    pub node_eligible: bool,
    /// Cluster IPs of Services, each with the number of Services that have it: the other ports of
    /// these addresses are known to lead nowhere.
    pub cluster_ips: BTreeMap<IpAddr, u32>,
    /// Ranges of ClusterIPs: an address in them that no Service has is unallocated.
    pub service_cidrs: BTreeSet<ipnet::IpNet>,
    /// The addresses of the other nodes that may forward packets to this one directly.
    pub direct_nodes: BTreeSet<IpAddr>,
    /// The MAC addresses of the other nodes that take part, and whether the node finds the endpoint
    /// of a packet that is sent to it as it is.
    pub direct_macs: BTreeMap<[u8; 6], bool>,
    pub warnings: BTreeSet<Warning>,
}

impl Desired {
    /// Returns the ports of one Service, in the order of their keys.
    pub fn ports_of<'a>(
        &'a self,
        service: &'a ServiceName,
    ) -> impl Iterator<Item = (&'a ServicePortKey, &'a Arc<ServicePort>)> {
        let first = ServicePortKey {
            service: service.clone(),
            port: String::new(),
            protocol: Protocol::Tcp,
            ipv6: false,
        };
        self.ports.range(first..).take_while(move |(key, _)| key.service == *service)
    }

    /// Returns the Service ports with a frontend or an endpoint at one of these addresses: their
    /// map entries depend on whether the address is this node's.
    pub fn ports_at<'a>(&self, addresses: impl Iterator<Item = &'a IpAddr>) -> Vec<ServicePortKey> {
        let addresses: BTreeSet<&IpAddr> = addresses.collect();
        if addresses.is_empty() {
            return Vec::new();
        }
        let is_at = |port: &ServicePort| {
            let frontends = port.frontends.iter().map(|frontend| frontend.address.ip());
            let endpoints = port.cluster.iter().chain(&port.local).map(|endpoint| endpoint.address.ip());
            frontends.chain(endpoints).any(|address| addresses.contains(&address))
        };
        self.ports.iter().filter(|(_, port)| is_at(port)).map(|(key, _)| key.clone()).collect()
    }
}

/// Something a person should know: two Services that claim one node port, an invalid address, an
/// endpoint of the wrong family.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Warning {
    /// The Service that is not, or not wholly, served as specified; `None` for what concerns all of
    /// them.
    pub service: Option<ServiceName>,
    /// One complete sentence that names the object.
    pub text: String,
}

/// The end of the sentence about ports of a Service whose protocol is not served.
pub const OTHER_PROTOCOLS: &str = "left alone: neither TCP, UDP nor SCTP";

impl Warning {
    /// Whether this is only a note: nobody made a mistake, and nothing needs to be done.
    #[must_use]
    pub fn is_note(&self) -> bool {
        self.text.strip_suffix('.').is_some_and(|text| text.ends_with(OTHER_PROTOCOLS))
    }
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}
