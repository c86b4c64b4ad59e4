//! Inputs of the desired state besides Services and their slices: the node, and flags.

use std::{collections::BTreeSet, net::IpAddr};

use ipnet::IpNet;

use super::{HealthPortRules, Limits, object::Service, topology::NodeTopology};

/// Inputs of the model from the node that the agent runs on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeInput {
    /// The name of this node's Node object, which endpoints give as `nodeName`.
    pub node_name: String,
    /// On which addresses node ports are reached.
    pub node_port_addresses: Vec<IpAddr>,
    /// Whether node ports are reached on 127.0.0.0/8, by the node's own processes.
    pub loopback_ipv4: bool,
    /// Whether node ports are reached on `::1`, by the node's own processes.
    pub loopback_ipv6: bool,
    /// Ranges of cluster IPs beside those of ServiceCIDR objects (`--service-cidr`).
    pub service_cidrs: BTreeSet<IpNet>,
    /// Ports that a Service's annotation may give it as health port here.
    pub health_ports: HealthPortRules,
    /// The room of the maps.
    pub limits: Limits,
    /// Whether this node does IPv4.
    pub ipv4: bool,
    /// Whether this node does IPv6.
    pub ipv6: bool,
}

/// All that the result depends on beside the Service and its slices.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Context {
    pub(super) input: NodeInput,
    pub(super) zone: Option<String>,
    /// The Node's own addresses.
    pub(super) primary: Vec<IpAddr>,
}

impl Context {
    pub(super) fn topology(&self) -> NodeTopology<'_> {
        NodeTopology { node_name: &self.input.node_name, zone: self.zone.as_deref() }
    }

    /// Whether both this node and the Service do this family.
    pub(super) fn serves(&self, service: &Service, ipv6: bool) -> bool {
        if ipv6 { self.input.ipv6 && service.ipv6 } else { self.input.ipv4 && service.ipv4 }
    }
}
