//! Limits of one Service: it may ask for no more than the maps can hold at all. Frontends and
//! source ranges are counted before anything is built, since a Service has a frontend for each of
//! its ports at each of its addresses: an object of a few kilobytes can ask for millions. Endpoints
//! are counted port by port, as they are chosen.

use std::{collections::BTreeSet, net::IpAddr, ops::AddAssign};

use super::{
    Excess, Limits, ServicePort,
    capacity::{Demand, Kind, TIMES},
    context::Context,
    object::Service,
    slice_ports::SlicePorts,
    source_ranges::source_ranges,
};

/// The slices of one Service may list this many times the endpoints that the map takes, over all of
/// its ports: they also name endpoints that do not serve, and those of other zones.
const LISTED: u64 = 4;

/// Returns the entries that a Service asks for, without those of endpoints.
///
/// # Errors
/// It asks for more than a map takes, or its slices list more endpoints than are examined.
pub(super) fn demand(
    service: &Service,
    slices: &SlicePorts<'_>,
    context: &Context,
) -> Result<Demand, Excess> {
    let limits = &context.input.limits;
    let mut demand = Demand::default();
    for ipv6 in context.families(service) {
        let family = usize::from(ipv6);
        let frontends = frontends(service, context, ipv6);
        let ranges = source_ranges(service, ipv6, context).len() as u64;
        let ranges = ranges.saturating_mul(service.ports.len() as u64);
        let listed = service.ports.iter().map(|port| slices.count(port, ipv6)).fold(0, u64::saturating_add);
        let cluster_ips = service.cluster_ips.iter().filter(|ip| ip.is_ipv6() == ipv6).count() as u64;
        demand.set(Kind::Frontends, ipv6, frontends + cluster_ips);
        demand.set(Kind::SourceRanges, ipv6, ranges);
        for (kind, needed, room) in [
            (Kind::Frontends, frontends, limits.frontends[family].into()),
            (Kind::SourceRanges, ranges, limits.source_ranges[family].into()),
            (Kind::Listed, listed, u64::from(limits.endpoints) * LISTED),
        ] {
            if needed > room {
                return Err(Excess::alone(context.served_ports(service), [needed, room], kind, ipv6));
            }
        }
    }
    Ok(demand)
}

/// Returns the number of frontends of a Service in one family: one for each of its ports at each of
/// its distinct addresses.
fn frontends(service: &Service, context: &Context, ipv6: bool) -> u64 {
    let distinct = |lists: &[&[IpAddr]]| {
        let addresses = lists.iter().copied().flatten().filter(|address| address.is_ipv6() == ipv6);
        addresses.collect::<BTreeSet<_>>().len() as u64
    };
    let input = &context.input;
    let at_port = distinct(&[&service.load_balancer_ips, &service.cluster_ips, &service.external_ips]);
    let any = u64::from(context.any_node_port(ipv6).is_some());
    let at_node_port = distinct(&[&input.node_port_addresses]) + any;
    let node_ports = service.ports.iter().filter(|port| port.node_port != 0).count() as u64;
    let ports = service.ports.len() as u64;
    ports.saturating_mul(at_port).saturating_add(node_ports.saturating_mul(at_node_port))
}

/// The endpoints of a Service in one family, as its ports choose them.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Chosen {
    /// Entries in the map of endpoints: one list for each policy that is used.
    slots: u64,
    /// The number of endpoints that may keep flows.
    serving: u64,
}

impl Chosen {
    /// Returns the number of entries needed in the map or in memory, whichever is larger.
    pub(super) fn cost(self) -> u64 {
        self.slots.max(self.serving)
    }

    /// Returns the kind that exceeds its limit, with the number of entries and the limit.
    pub(super) fn excess(self, limits: &Limits) -> Option<(Kind, [u64; 2])> {
        let map = u64::from(limits.endpoints);
        let slots = (Kind::Endpoints, [self.slots, map]);
        let serving = (Kind::Serving, [self.serving, map * TIMES]);
        [slots, serving].into_iter().find(|(_, [needed, room])| needed > room)
    }
}

impl AddAssign<&ServicePort> for Chosen {
    fn add_assign(&mut self, port: &ServicePort) {
        self.slots += (port.cluster.len() + port.local.len()) as u64;
        self.serving += port.serving.len() as u64;
    }
}
