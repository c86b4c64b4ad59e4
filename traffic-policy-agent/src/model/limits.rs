//! Limits of one Service: it may ask for no more than the maps can hold at all. It is counted before anything is built, since a
//! Service has a frontend for each of its ports at each of its addresses: an object of some kilobytes can ask for millions.

use std::fmt;

use super::{
    ServiceName,
    context::Context,
    object::{Port, Service},
    slice_ports::SlicePorts,
};

/// Sizes of the maps, in entries; pairs are IPv4, IPv6.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    pub frontends: [u32; 2],
    pub source_ranges: [u32; 2],
    /// Of each family.
    pub endpoints: u32,
}

impl Default for Limits {
    /// As the maps are declared.
    fn default() -> Self {
        Self { frontends: [65_536; 2], source_ranges: [65_536; 2], endpoints: 262_144 }
    }
}

/// One kind of map entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Frontends,
    SourceRanges,
    Endpoints,
}

/// A Service that asks for more than a map can hold, over all of its ports: nothing of it is served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Excess {
    /// Ports of the Service, once for each family.
    pub ports: usize,
    kind: Kind,
    ipv6: bool,
    needed: u64,
    room: u32,
}

impl Excess {
    /// The warning for a person.
    #[must_use]
    pub fn sentence(&self, service: &ServiceName) -> String {
        format!(
            "Service {service}: the maps have no room for it: {self}. Nothing of it is served until it asks for less."
        )
    }
}

impl fmt::Display for Excess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (verb, what, flag) = match self.kind {
            Kind::Frontends => ("needs", "frontends", "--frontend-entries"),
            Kind::SourceRanges => ("needs", "source ranges", "--source-range-entries"),
            Kind::Endpoints => ("has", "endpoints", "--endpoint-entries"),
        };
        let family = if self.ipv6 { "IPv6" } else { "IPv4" };
        let Self { needed, room, .. } = self;
        write!(
            f,
            "it {verb} {needed} {family} {what} over all of its ports, and the map takes {room} ({flag})"
        )
    }
}

/// The resource that a Service asks too much of. Addresses that are given twice, and endpoints in two slices, count twice.
pub(super) fn excess(service: &Service, slices: &SlicePorts<'_>, context: &Context) -> Option<Excess> {
    let limits = &context.input.limits;
    let families: Vec<bool> =
        [false, true].into_iter().filter(|ipv6| context.serves(service, *ipv6)).collect();
    families.iter().find_map(|&ipv6| {
        let family = usize::from(ipv6);
        let needed = Needed::of(service, slices, context, ipv6);
        let excess = [
            (Kind::Frontends, needed.frontends, limits.frontends[family]),
            (Kind::SourceRanges, needed.source_ranges, limits.source_ranges[family]),
            (Kind::Endpoints, needed.endpoints, limits.endpoints),
        ];
        let (kind, needed, room) = excess.into_iter().find(|(_, needed, room)| *needed > u64::from(*room))?;
        Some(Excess { ports: service.ports.len() * families.len(), kind, ipv6, needed, room })
    })
}

struct Needed {
    frontends: u64,
    source_ranges: u64,
    endpoints: u64,
}

impl Needed {
    fn of(service: &Service, slices: &SlicePorts<'_>, context: &Context, ipv6: bool) -> Self {
        let count = |addresses: &[std::net::IpAddr]| {
            addresses.iter().filter(|address| address.is_ipv6() == ipv6).count() as u64
        };
        let ports = service.ports.len() as u64;
        let input = &context.input;
        let balanced = count(&service.load_balancer_ips);
        let at_port = balanced + count(&service.cluster_ips) + count(&service.external_ips);
        let loopback = if ipv6 { input.loopback_ipv6 } else { input.loopback_ipv4 };
        let at_node_port = count(&input.node_port_addresses) + u64::from(loopback);
        let node_ports = service.ports.iter().filter(|port| port.node_port != 0).count() as u64;
        let ranges =
            service.source_ranges.iter().filter(|range| range.addr().is_ipv6() == ipv6).count() as u64;
        // Those that admit the node admit the load balancer's addresses, too.
        let ranges = if ranges == 0 { 0 } else { ranges + balanced };
        let endpoints = |port: &Port| slices.count(port, ipv6);
        Self {
            frontends: ports.saturating_mul(at_port).saturating_add(node_ports.saturating_mul(at_node_port)),
            source_ranges: ports.saturating_mul(ranges),
            endpoints: service.ports.iter().map(endpoints).fold(0, u64::saturating_add),
        }
    }
}
