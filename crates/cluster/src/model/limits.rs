//! Limits of one Service: it may ask for no more than the maps can hold at all. Frontends and
//! source ranges are counted before anything is built, since a Service has a frontend for each of
//! its ports at each of its addresses: an object of a few kilobytes can ask for millions. Endpoints
//! are counted port by port, as they are chosen.

use std::{collections::BTreeSet, fmt, net::IpAddr, ops::AddAssign};

use super::{
    ServiceName, ServicePort, context::Context, object::Service, service_port, shares::TIMES,
    slice_ports::SlicePorts,
};

/// Sizes of the maps, in entries; pairs are IPv4, IPv6.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    pub frontends: [u32; 2],
    pub source_ranges: [u32; 2],
    /// The number of endpoints in each family.
    pub endpoints: u32,
}

impl Default for Limits {
    /// Returns the sizes with which the maps are declared.
    fn default() -> Self {
        Self { frontends: [65_536; 2], source_ranges: [65_536; 2], endpoints: 262_144 }
    }
}

/// The slices of one Service may list this many times the endpoints that the map takes, over all of
/// its ports: they also name endpoints that do not serve, and those of other zones.
const LISTED: u64 = 4;

/// A kind of entry that a Service asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Frontends,
    SourceRanges,
    Endpoints,
    /// Endpoints that its slices name, before any is chosen.
    Listed,
    /// Endpoints that may keep flows, whether or not they get new ones.
    Serving,
}

/// The entries that a Service asks for, over all of its ports, by kind and family.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Demand([u64; 6]);

impl Demand {
    /// Sets the number of entries of one kind and family: frontends include the ClusterIPs,
    /// endpoints are counted as in [`Chosen::cost`].
    pub(super) fn set(&mut self, kind: Kind, ipv6: bool, entries: u64) {
        let at = match kind {
            Kind::Frontends => 0,
            Kind::SourceRanges => 2,
            Kind::Endpoints | Kind::Listed | Kind::Serving => 4,
        };
        self.0[at + usize::from(ipv6)] = entries;
    }

    /// Returns the capacity of the maps, multiplied by `times`.
    pub(super) fn room(limits: &Limits, times: u64) -> Self {
        let Limits { frontends, source_ranges, endpoints } = *limits;
        let [f4, f6] = frontends;
        let [r4, r6] = source_ranges;
        Self([f4, f6, r4, r6, endpoints, endpoints].map(|entries| u64::from(entries) * times))
    }

    pub(super) fn fits(&self, room: &Self) -> bool {
        self.0.iter().zip(room.0).all(|(needed, room)| *needed <= room)
    }

    pub(super) fn plus(&self, other: &Self) -> Self {
        self.with(other, u64::saturating_add)
    }

    pub(super) fn minus(&self, other: &Self) -> Self {
        self.with(other, u64::saturating_sub)
    }

    fn with(&self, other: &Self, operation: impl Fn(u64, u64) -> u64) -> Self {
        let mut result = *self;
        for (one, other) in result.0.iter_mut().zip(other.0) {
            *one = operation(*one, other);
        }
        result
    }
}

/// A Service that asks for more than there is room for, over all of its ports: no part of it is
/// served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Excess {
    /// The number of ports of the Service, counted once for each family.
    pub ports: usize,
    cause: Cause,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Cause {
    /// The Service alone needs more than a map can hold.
    Alone { kind: Kind, ipv6: bool, needed: u64, room: u64 },
    /// Other Services leave no room. There are no numbers, because they change with each of those.
    BesideOthers,
}

impl Excess {
    /// Returns the warning for a person.
    #[must_use]
    pub fn sentence(&self, service: &ServiceName) -> String {
        format!(
            "Service {service}: the maps have no room for it: {self}. Nothing of it is served until it asks for less."
        )
    }
}

impl fmt::Display for Excess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Cause::Alone { kind, ipv6, needed, room } = self.cause else {
            return f.write_str(
                "all Services together ask for more than twice what a map takes, and those that are served, then \
                 older ones, come first \
                 (--frontend-entries, --source-range-entries, --endpoint-entries)",
            );
        };
        let (verb, what, flag) = match kind {
            Kind::Frontends => ("needs", "frontends", "--frontend-entries"),
            Kind::SourceRanges => ("needs", "source ranges", "--source-range-entries"),
            Kind::Endpoints => ("has", "endpoints", "--endpoint-entries"),
            Kind::Serving => ("has", "endpoints that serve, on all nodes,", "--endpoint-entries"),
            Kind::Listed => ("lists", "endpoints, with those that do not serve,", "--endpoint-entries"),
        };
        let family = if ipv6 { "IPv6" } else { "IPv4" };
        let limit = match kind {
            Kind::Listed => "no more are looked at than",
            Kind::Serving => "no more are remembered than",
            _ => "the map takes",
        };
        write!(f, "it {verb} {needed} {family} {what} over all of its ports, and {limit} {room} ({flag})")
    }
}

impl Excess {
    pub(super) fn alone(
        service: &Service,
        context: &Context,
        [needed, room]: [u64; 2],
        kind: Kind,
        ipv6: bool,
    ) -> Self {
        Self { ports: ports(service, context), cause: Cause::Alone { kind, ipv6, needed, room } }
    }

    pub(super) fn beside_others(service: &Service, context: &Context) -> Self {
        Self { ports: ports(service, context), cause: Cause::BesideOthers }
    }
}

fn ports(service: &Service, context: &Context) -> usize {
    service.ports.len() * families(service, context).count()
}

fn families(service: &Service, context: &Context) -> impl Iterator<Item = bool> {
    [false, true].into_iter().filter(|ipv6| context.serves(service, *ipv6))
}

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
    for ipv6 in families(service, context) {
        let family = usize::from(ipv6);
        let frontends = frontends(service, context, ipv6);
        let ranges = service_port::source_ranges(service, ipv6, context).len() as u64;
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
                return Err(Excess::alone(service, context, [needed, room], kind, ipv6));
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
    let loopback = if ipv6 { input.loopback_ipv6 } else { input.loopback_ipv4 };
    let at_node_port = distinct(&[&input.node_port_addresses]) + u64::from(loopback);
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
