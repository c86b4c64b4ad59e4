//! The maps of direct forwarding: the nodes that may send, and the endpoints of this node.

mod gone;
mod leaving;
mod macs;
mod namespaces;
mod nodes;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap as Index},
    net::{IpAddr, SocketAddr},
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use aya::{
    Ebpf, Pod,
    maps::{HashMap, MapData},
};
use traffic_policy_cluster::model::{Changes, Desired, ServicePortKey};
use traffic_policy_ebpf::abi::{
    Address, Address4, Address6, DirectEndpoint, DirectEndpointKey, NO_SERVICE, Port,
};

use self::{leaving::Leaving, macs::Macs, namespaces::Namespaces, nodes::Nodes};
use super::{
    maps::{
        keys::{FromWire, ToWire as _},
        size, take,
    },
    sync::plan::Planner,
};
use crate::node::pod_namespaces;

/// The maps of both families, and the nodes by their MAC addresses.
pub struct Direct {
    v4: OfFamily<Address4>,
    v6: OfFamily<Address6>,
    macs: Macs,
    namespaces: Namespaces,
}

impl Direct {
    /// Takes the maps out of a loaded object.
    ///
    /// # Errors
    /// A map is missing or of another type: object and agent are of different builds.
    pub fn open(object: &mut Ebpf, now: Instant) -> Result<Self> {
        let (v4, v6) = (OfFamily::open(object, now)?, OfFamily::open(object, now)?);
        Ok(Self { v4, v6, macs: Macs::open(object)?, namespaces: Namespaces::default() })
    }

    /// Makes the map of MAC addresses equal to the desired state, and returns the number of
    /// elements written: next hops are to be resolved anew if there are any.
    ///
    /// # Errors
    /// The kernel refuses a change; the next call reads the map again.
    pub fn sync_macs(&mut self, desired: &Desired, all: bool) -> Result<usize> {
        self.macs.sync(&desired.direct_macs, all)
    }

    /// Makes the maps equal to the desired state, and returns the number of elements written.
    /// `addresses`: this node's own, at which nothing is opened.
    ///
    /// # Errors
    /// The kernel refuses a change; the next call reads the maps again.
    pub fn sync(
        &mut self,
        desired: &Desired,
        changes: &Changes,
        planner: &Planner,
        addresses: &BTreeSet<IpAddr>,
        all: bool,
        now: Instant,
    ) -> Result<usize> {
        for key in &changes.ports {
            let here = desired.ports.get(key).map(|port| &port.here);
            let is_here = |address| here.is_some_and(|here| here.iter().any(|at| at.ip() == address));
            let former = self.v4.addresses(key).chain(self.v6.addresses(key));
            former.filter(|address| !is_here(*address)).for_each(|address| self.namespaces.forget(address));
        }
        // Without other nodes no packet is opened for these endpoints.
        if !desired.direct_nodes.is_empty() {
            let keys: Vec<_> =
                if all { desired.ports.keys().collect() } else { changes.ports.iter().collect() };
            let here =
                keys.into_iter().filter_map(|key| desired.ports.get(key)).flat_map(|port| port.here.iter());
            let here = here.map(SocketAddr::ip).filter(|address| !addresses.contains(address));
            self.namespaces.learn(here, all, pod_namespaces::by_address);
        }
        let here = (addresses, &self.namespaces);
        let v4 = self.v4.sync(desired, changes, planner, here, all, now)?;
        Ok(v4 + self.v6.sync(desired, changes, planner, here, all, now)?)
    }

    /// Forgets nodes whose Leases have been gone for long enough: the next sync may be hours away.
    ///
    /// # Errors
    /// The kernel refuses a change; the next sync reads the map again.
    pub fn forget_nodes(&mut self, now: Instant) -> Result<()> {
        self.v4.nodes.forget(now)?;
        self.v6.nodes.forget(now)?;
        self.macs.forget_nodes(now)
    }

    /// Returns the number of other nodes' addresses in the maps: IPv4, IPv6.
    #[must_use]
    pub fn nodes(&self) -> [usize; 2] {
        [self.v4.nodes.len(), self.v6.nodes.len()]
    }

    /// Returns the number of other nodes' MAC addresses in the map.
    #[must_use]
    pub fn macs(&self) -> usize {
        self.macs.len()
    }

    /// Returns the number of other nodes' addresses for which there is room, of each family, and
    /// that of MAC addresses.
    #[must_use]
    pub fn room(&self) -> [u32; 2] {
        [nodes::ROOM, self.macs.room()]
    }

    /// Whether some elements found no room.
    pub fn is_full(&self) -> bool {
        self.v4.is_full || self.v6.is_full
    }
}

/// An address as a key of its family's maps.
trait Key: Address + FromWire + Pod {
    const NODES: &str;
    const BY_NUMBER: &str;
    const ENDPOINTS: &str;

    /// Returns the form of an address of this family; `None` if it is of the other one.
    fn of(address: IpAddr) -> Option<Self>;
}

impl Key for Address4 {
    const NODES: &str = "tp_direct_from4";
    const BY_NUMBER: &str = "tp_direct_node4";
    const ENDPOINTS: &str = "tp_direct_eps4";

    fn of(address: IpAddr) -> Option<Self> {
        if let IpAddr::V4(address) = address { Some(address.to_wire()) } else { None }
    }
}

impl Key for Address6 {
    const NODES: &str = "tp_direct_from6";
    const BY_NUMBER: &str = "tp_direct_node6";
    const ENDPOINTS: &str = "tp_direct_eps6";

    fn of(address: IpAddr) -> Option<Self> {
        if let IpAddr::V6(address) = address { Some(address.to_wire()) } else { None }
    }
}

/// The maps of a family, and what they hold.
struct OfFamily<A: Key> {
    nodes: Nodes<A>,
    endpoints: HashMap<MapData, DirectEndpointKey<A>, DirectEndpoint>,
    /// The endpoints as they are in the map; `None`: not read yet.
    held: Option<BTreeMap<Place, Target>>,
    /// The elements that each Service port wants.
    wanted: Index<ServicePortKey, Vec<Element>>,
    /// The elements that no Service port wants any more, for connections that are still open.
    leaving: Leaving,
    /// The number of elements that fit into `endpoints`, and whether some found no room last time.
    room: usize,
    is_full: bool,
    /// The time until which the elements of an earlier agent stay while no other node is known.
    kept_until: Option<Instant>,
}

/// The time for which an agent that knows of no other node leaves the maps alone: it may have been
/// started without `--announce-opening`, and the others send packets until they have found out.
const KEPT: Duration = Duration::from_secs(1800);

/// An endpoint's address, and the index of the Service port or [`NO_SERVICE`].
type Place = (IpAddr, u32);
type Element = (Place, Target);

/// The value of an element.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
struct Target {
    /// The port of the endpoint, or 0.
    port: u16,
    /// The network namespace of its pod: [`DirectEndpoint::netns`].
    netns: u16,
}

impl<A: Key> OfFamily<A> {
    fn open(object: &mut Ebpf, now: Instant) -> Result<Self> {
        Ok(Self {
            room: size(object, A::ENDPOINTS)? as usize,
            nodes: Nodes::open(object)?,
            endpoints: take(object, A::ENDPOINTS)?,
            held: None,
            wanted: Index::new(),
            leaving: Leaving::default(),
            is_full: false,
            kept_until: now.checked_add(KEPT),
        })
    }

    fn sync(
        &mut self,
        desired: &Desired,
        changes: &Changes,
        planner: &Planner,
        (addresses, namespaces): (&BTreeSet<IpAddr>, &Namespaces),
        all: bool,
        now: Instant,
    ) -> Result<usize> {
        if desired.direct_nodes.is_empty() && self.kept_until.is_some_and(|until| now < until) {
            return Ok(0);
        }
        // Also where all is compared anyway, as at a start.
        let all = self.kept_until.take().is_some() || all;
        let mut written = self.nodes.sync(desired, all, now)?;
        let mut held = match self.held.take() {
            Some(held) if !all => held,
            _ => self.read().context("reading the maps of direct forwarding failed")?,
        };
        let mut doubtful = BTreeSet::new();
        doubtful.extend(self.leaving.expire(now));
        if all {
            self.wanted.clear();
            doubtful.extend(held.keys().copied());
            let indices = desired.ports.keys().filter_map(|key| planner.index_of(key));
            self.leaving.found(&held, &indices.collect(), now);
        }
        if self.is_full {
            // What found no room may find some now, and lacks until then.
            doubtful.extend(self.wanted.values().flatten().map(|(key, _)| *key));
        }
        let keys: Vec<_> = if all { desired.ports.keys().collect() } else { changes.ports.iter().collect() };
        for key in keys {
            let former = self.wanted.remove(key).unwrap_or_default();
            doubtful.extend(former.iter().map(|(key, _)| *key));
            let wanted = elements::<A>(desired, key, planner, addresses, namespaces);
            doubtful.extend(wanted.iter().map(|(key, _)| *key));
            if !desired.ports.contains_key(key) {
                doubtful.extend(self.leaving.forget(&former));
            }
            let stays = |((_, index), _): &Element| *index == NO_SERVICE || desired.ports.contains_key(key);
            self.leaving.note(former.into_iter().filter(stays), now);
            if !wanted.is_empty() {
                self.wanted.insert(key.clone(), wanted);
            }
        }
        if !doubtful.is_empty() {
            written += self.sync_endpoints(&doubtful, &mut held)?;
        }
        self.held = Some(held);
        Ok(written)
    }

    /// The addresses of a Service port's endpoints here, as they were at the last sync.
    fn addresses(&self, key: &ServicePortKey) -> impl Iterator<Item = IpAddr> {
        self.wanted.get(key).into_iter().flatten().map(|((address, _), _)| *address)
    }

    /// Brings these elements up to date: of Service ports with the same one, any may name the port.
    fn sync_endpoints(
        &mut self,
        doubtful: &BTreeSet<Place>,
        held: &mut BTreeMap<Place, Target>,
    ) -> Result<usize> {
        let mut wanted: BTreeMap<_, _> =
            self.wanted.values().flatten().filter(|(key, _)| doubtful.contains(key)).copied().collect();
        self.leaving.add_to(&mut wanted, doubtful, held.len() < self.room);
        let Plan { writes, lacking } = plan(doubtful, &wanted, held, self.room);
        if lacking > 0 && !self.is_full {
            tracing::warn!(
                "there is no room for {lacking} elements of {} in {}: packets that other nodes forward directly to \
                 those endpoints are not opened; set --forwarding snat, or the annotation of Services with many ports",
                self.room,
                A::ENDPOINTS
            );
        }
        self.is_full = lacking > 0;
        for (key, target) in &writes {
            let Some(address) = A::of(key.0) else { continue };
            let element = DirectEndpointKey { address, service: key.1, zero: 0 };
            if let Some(Target { port, netns }) = *target {
                let value = DirectEndpoint { port: Port::from_host(port), netns };
                let written = self.endpoints.insert(element, value, 0);
                written.with_context(|| format!("naming endpoint {} of direct forwarding failed", key.0))?;
                held.insert(*key, Target { port, netns });
            } else {
                let removed = self.endpoints.remove(&element);
                removed.context("forgetting an endpoint of direct forwarding failed")?;
                held.remove(key);
            }
        }
        Ok(writes.len())
    }

    fn read(&self) -> Result<BTreeMap<Place, Target>> {
        let entries = self.endpoints.iter().map(|entry| {
            let (key, value) = entry?;
            let target = Target { port: value.port.to_host(), netns: value.netns };
            Ok(((key.address.to_ip(), key.service), target))
        });
        entries.collect()
    }
}

/// The writes that make some elements equal to what is wanted: removals come first.
#[derive(Debug, PartialEq, Eq)]
struct Plan {
    /// The new value of an element, or `None` to remove it.
    writes: Vec<(Place, Option<Target>)>,
    /// The number of elements for which there is no room.
    lacking: usize,
}

/// Plans for the elements in `doubtful` in a map for `room` elements. An element without room is
/// left out alone: a tenant with many Services must not keep the others from being written.
fn plan(
    doubtful: &BTreeSet<Place>,
    wanted: &BTreeMap<Place, Target>,
    held: &BTreeMap<Place, Target>,
    room: usize,
) -> Plan {
    let removed = doubtful.iter().filter(|key| held.contains_key(key) && !wanted.contains_key(key));
    let mut writes: Vec<_> = removed.map(|key| (*key, None)).collect();
    let mut free = room.saturating_sub(held.len() - writes.len());
    let mut lacking = 0;
    for (key, target) in wanted {
        match held.get(key) {
            Some(found) if found == target => {}
            Some(_) => writes.push((*key, Some(*target))),
            None if free == 0 => lacking += 1,
            None => {
                free -= 1;
                writes.push((*key, Some(*target)));
            }
        }
    }
    Plan { writes, lacking }
}

/// Returns the elements that a Service port wants: two for each address of its endpoints here. Of
/// several ports at one address, the lowest is taken.
fn elements<A: Key>(
    desired: &Desired,
    key: &ServicePortKey,
    planner: &Planner,
    addresses: &BTreeSet<IpAddr>,
    namespaces: &Namespaces,
) -> Vec<Element> {
    let (Some(port), Some(index)) = (desired.ports.get(key), planner.index_of(key)) else {
        return Vec::new();
    };
    let mut elements = Vec::new();
    let mut last = None;
    for endpoint in port.here.iter().filter(|endpoint| !addresses.contains(&endpoint.ip())) {
        let ip = endpoint.ip();
        if A::of(ip).is_some() && last.replace(ip) != Some(ip) {
            let target = Target { port: endpoint.port(), netns: namespaces.of(ip) };
            elements.push(((ip, index), target));
            elements.push(((ip, NO_SERVICE), Target::default()));
        }
    }
    elements
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    const fn at(port: u16) -> Target {
        Target { port, netns: 0 }
    }

    fn elements(list: &[(u8, u32, u16)]) -> BTreeMap<Place, Target> {
        let ip = |last| IpAddr::from(Ipv4Addr::new(10, 0, 0, last));
        list.iter().map(|(last, service, port)| ((ip(*last), *service), at(*port))).collect()
    }

    fn planned(wanted: &[(u8, u32, u16)], held: &[(u8, u32, u16)], room: usize) -> Plan {
        let (wanted, held) = (elements(wanted), elements(held));
        let doubtful = wanted.keys().chain(held.keys()).copied().collect();
        plan(&doubtful, &wanted, &held, room)
    }

    #[test]
    fn only_what_differs_is_written() {
        let key = |last, service| (IpAddr::from(Ipv4Addr::new(10, 0, 0, last)), service);
        let plan = planned(&[(1, 1, 80), (2, 1, 81), (3, 1, 80)], &[(1, 1, 80), (2, 1, 80), (4, 1, 80)], 8);
        let writes = vec![(key(4, 1), None), (key(2, 1), Some(at(81))), (key(3, 1), Some(at(80)))];
        assert_eq!(plan, Plan { writes, lacking: 0 });
    }

    /// The address as such, without a Service, is written last: nothing is opened before.
    #[test]
    fn an_address_is_opened_for_a_service_first() {
        let plan = planned(&[(1, NO_SERVICE, 0), (1, 7, 80)], &[], 8);
        assert_eq!(plan.writes.iter().map(|((_, service), _)| *service).collect::<Vec<_>>(), [7, NO_SERVICE]);
    }

    #[test]
    fn what_finds_no_room_is_left_out_alone() {
        let held = [(1, 1, 80), (2, 1, 80)];
        let plan = planned(&[(2, 1, 80), (3, 1, 80), (4, 1, 80)], &held, 2);
        assert_eq!((plan.writes.len(), plan.lacking), (2, 1), "one is removed, and one comes in its place");
        let plan = planned(&[(1, 1, 81), (2, 1, 80), (3, 1, 80)], &held, 2);
        assert_eq!((plan.writes.len(), plan.lacking), (1, 1), "a port is changed in place");
    }
}
