//! One Service and its endpoints as all nodes of a cluster see them.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    ServicePortKey,
    everywhere::Everywhere,
    health_ports::health_port,
    object::{EndpointSlice, Service},
    slice_ports::SlicePorts,
};

/// One Service on every node.
#[derive(Debug)]
pub struct Reach<'a> {
    pub service: &'a Service,
    /// The Service ports in the order of `spec.ports`, IPv4 before IPv6.
    pub ports: Vec<(ServicePortKey, Everywhere<'a>)>,
    pub health: Option<HealthReach<'a>>,
}

/// A health port on every node.
#[derive(Debug)]
pub struct HealthReach<'a> {
    pub port: u16,
    local_endpoints: BTreeMap<&'a str, usize>,
}

impl HealthReach<'_> {
    /// The number of endpoints that a node's answer reports; 0: it answers 503.
    #[must_use]
    pub fn local_endpoints(&self, node_name: &str) -> usize {
        self.local_endpoints.get(node_name).copied().unwrap_or(0)
    }
}

impl<'a> Reach<'a> {
    pub(super) fn new(service: &'a Service, slices: &[&'a EndpointSlice]) -> Self {
        let slices = SlicePorts::new(slices);
        let mut ports = Vec::new();
        let mut local_endpoints: BTreeMap<&'a str, usize> = BTreeMap::new();
        for ipv6 in [false, true] {
            if !(if ipv6 { service.ipv6 } else { service.ipv4 }) {
                continue;
            }
            let mut ready: BTreeMap<&'a str, BTreeSet<_>> = BTreeMap::new();
            for port in &service.ports {
                let everywhere = Everywhere::new(slices.endpoints(port, ipv6));
                for (node, addresses) in everywhere.ready_by_node() {
                    ready.entry(node).or_default().extend(addresses.iter().map(std::net::SocketAddr::ip));
                }
                let key = ServicePortKey {
                    service: service.name.clone(),
                    port: port.name.clone(),
                    protocol: port.protocol,
                    ipv6,
                };
                ports.push((key, everywhere));
            }
            // A dual-stack pod is one endpoint with two addresses, so families are not added up.
            for (node, addresses) in ready {
                let most = local_endpoints.entry(node).or_default();
                *most = (*most).max(addresses.len());
            }
        }
        let health = health_port(service).map(|port| HealthReach { port, local_endpoints });
        Self { service, ports, health }
    }
}
