//! Inputs of the desired state other than Services and their slices: the node, and flags.

use std::{collections::BTreeSet, net::IpAddr, sync::Arc};

use ipnet::IpNet;

use super::{
    Algorithm, DispatchChoice, Forwarding, FrontendKind, HealthPortRules, Limits, Ways,
    direct_nodes::DirectNodes,
    node_numbers::NodeNumbers,
    object::Service,
    topology::{NodeTopology, Silent},
};

/// Inputs of the model from the node that the agent runs on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeInput {
    /// The name of this node's Node object, which endpoints give as `nodeName`.
    pub node_name: String,
    /// The addresses on which node ports are reached.
    pub node_port_addresses: Vec<IpAddr>,
    /// Whether the node's own processes reach node ports on 127.0.0.0/8.
    pub loopback_ipv4: bool,
    /// Whether the node's own processes reach node ports on `::1`.
    pub loopback_ipv6: bool,
    /// Ranges of cluster IPs in addition to those of ServiceCIDR objects (`--service-cidr`).
    pub service_cidrs: BTreeSet<IpNet>,
    /// Rules for the ports that an annotation may give a Service as its health port on this node.
    pub health_ports: HealthPortRules,
    /// The algorithm of Services whose annotation names none.
    pub algorithm: Algorithm,
    /// The capacity of the maps.
    pub limits: Limits,
    /// The way of packets to endpoints of other nodes, where a Service has no annotation.
    pub forwarding: Forwarding,
    /// The outer packet of what is forwarded directly (`--dispatch`).
    pub dispatch: DispatchChoice,
    /// The ways to the other nodes, which count if nobody has chosen the outer packet.
    pub ways: Arc<Ways>,
    /// The settings on which the choice of an endpoint depends beyond the cluster's objects, as
    /// text. Two nodes with the same text have the same Maglev tables.
    pub choice: String,
    /// Whether no flow is to begin as a direct one yet: other nodes may not know this one.
    /// Connections of others that go on by this node are sent to their owners all the same.
    pub hold_direct: bool,
    /// Whether this node has IPv4.
    pub ipv4: bool,
    /// Whether this node has IPv6.
    pub ipv6: bool,
}

/// Everything that the result depends on, other than the Service and its slices.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Context {
    pub(super) input: NodeInput,
    pub(super) zone: Option<String>,
    /// The addresses of this node's Node object.
    pub(super) primary: Vec<IpAddr>,
    pub(super) numbers: Arc<NodeNumbers>,
    /// Those whose endpoints take no new flows.
    pub(super) silent: Arc<Silent>,
    /// The nodes that are about to go, whose endpoints take none while there are others.
    pub(super) leaving: Arc<BTreeSet<String>>,
    /// The other nodes that open packets.
    pub(super) direct: Arc<DirectNodes>,
}

impl Context {
    pub(super) fn topology(&self) -> NodeTopology<'_> {
        NodeTopology { node_name: &self.input.node_name, zone: self.zone.as_deref() }
    }

    /// Whether both this node and the Service support this family.
    pub(super) fn serves(&self, service: &Service, ipv6: bool) -> bool {
        if ipv6 { self.input.ipv6 && service.ipv6 } else { self.input.ipv4 && service.ipv4 }
    }

    /// Returns the families that both this node and the Service support: IPv4 is `false`, IPv6
    /// `true`.
    pub(super) fn families(&self, service: &Service) -> impl Iterator<Item = bool> {
        [false, true].into_iter().filter(|ipv6| self.serves(service, *ipv6))
    }

    /// Returns the kind of a frontend for a node port at no certain address, if there is one: for
    /// the node itself, on loopback, or at least for what other nodes forward directly to this one.
    pub(super) fn any_node_port(&self, ipv6: bool) -> Option<FrontendKind> {
        let loopback = if ipv6 { self.input.loopback_ipv6 } else { self.input.loopback_ipv4 };
        if loopback {
            Some(FrontendKind::LoopbackNodePort)
        } else {
            (!self.direct.addresses.is_empty()).then_some(FrontendKind::OpenedNodePort)
        }
    }

    /// Returns the number of ports of a Service, counted once for each family that is served.
    pub(super) fn served_ports(&self, service: &Service) -> usize {
        service.ports.len() * self.families(service).count()
    }
}
