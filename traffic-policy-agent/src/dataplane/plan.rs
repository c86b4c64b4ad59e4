//! The difference between what the maps hold and what they should hold. Pure: it says what to write, and in which order.
//!
//! Order makes each step safe: slots of a fresh range, then the frontends that point to them (each one atomic
//! replacement), then deletions. A list that did not change keeps its range, so a change of one Service writes only that
//! Service, and an agent that takes the maps over writes nothing where nothing changed.

mod entry;
mod places;
mod usage;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::{Duration, Instant},
};

use ipnet::{IpNet, Ipv4Net};
use traffic_policy_ebpf::abi::{Frontend, Range, ServiceInfo};

use self::places::{Vacated, take_over};
use super::ranges::Ranges;
use crate::model::{Desired, Endpoint, Protocol, ServicePort, ServicePortKey};

/// A frontend as a key of its map.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FrontendId {
    pub address: SocketAddr,
    pub protocol: Protocol,
}

/// One write.
#[derive(Clone, Debug, PartialEq)]
pub enum Op {
    /// Writes endpoints into a range that nobody reads yet.
    Slots {
        ipv6: bool,
        base: u32,
        endpoints: Vec<Endpoint>,
    },
    Put(FrontendId, Frontend),
    Delete(FrontendId),
    /// Says who has the index of a Service port; for people.
    Name(u32, Box<ServiceInfo>),
    /// Forgets who had an index, and what was counted for it.
    Unname(u32),
    /// Says that an address is a ClusterIP, whatever the port; or no longer.
    ClusterIp(IpAddr, bool),
    /// Says that ClusterIPs are taken from a range; or no longer.
    ServiceCidr(IpNet, bool),
    /// Lets sources of a range use the frontends of a Service port that have [`frontend::SOURCE_RANGES`].
    Allow(Source),
    Forbid(Source),
}

/// A source range of the Service port with this index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Source {
    pub ipv6: bool,
    pub service: u32,
    pub range: IpNet,
}

/// What the maps of both families hold.
#[derive(Debug, Default)]
pub struct Held {
    pub frontends: BTreeMap<FrontendId, Frontend>,
    /// Endpoints of each range in use, by family and base.
    pub slots: HashMap<(bool, u32), Vec<Endpoint>>,
    pub sources: BTreeSet<Source>,
    pub names: BTreeMap<u32, ServiceInfo>,
    pub cluster_ips: BTreeSet<IpAddr>,
    pub service_cidrs: BTreeSet<IpNet>,
}

/// Numbers that the plan depends on.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    pub slots: u32,
    pub services: u32,
}

/// What has been written, and what is free.
#[derive(Debug)]
pub struct Planner {
    held: Held,
    ports: BTreeMap<ServicePortKey, Applied>,
    ranges: [Ranges; 2],
    indices: Ranges,
    /// Endpoints in the maps as they were found, until the first plan has compared them.
    found: HashSet<GoneEndpoint>,
    first: bool,
    /// As it was compared with what the maps hold.
    cluster_ips: Option<Arc<BTreeMap<IpAddr, u32>>>,
    /// Who of `ports` has an index.
    owners: HashMap<u32, ServicePortKey>,
}

/// An endpoint that serves a Service port no more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GoneEndpoint {
    /// Index of the Service port.
    pub service: u32,
    pub endpoint: SocketAddr,
    pub protocol: Protocol,
}

#[derive(Clone, Debug)]
struct Applied {
    port: Arc<ServicePort>,
    index: u32,
    cluster: Range,
    local: Range,
}

/// What is to be done for one change of the desired state.
#[derive(Debug, Default)]
pub struct Plan {
    pub ops: Vec<Op>,
    /// Endpoints that take no more new flows of their Service port.
    pub gone: BTreeSet<GoneEndpoint>,
    /// Service ports for which the maps have no room.
    pub no_room: Vec<ServicePortKey>,
    /// Belongs at the end of `ops`.
    last: Vec<Op>,
}

/// What the plan must know besides the desired state.
#[derive(Clone, Debug)]
pub struct Context<'a> {
    /// All addresses of this node.
    pub addresses: &'a BTreeSet<IpAddr>,
    /// Drain of Services without an annotation of their own.
    pub drain: Duration,
    /// CLOCK_MONOTONIC, nanoseconds.
    pub monotonic: u64,
    pub now: Instant,
}

impl Planner {
    /// Starts from what the maps hold.
    pub fn new(held: Held, sizes: Sizes) -> Self {
        let taken = |ipv6: bool| {
            held.frontends
                .iter()
                .filter(move |(id, _)| id.address.is_ipv6() == ipv6)
                .flat_map(|(_, frontend)| [frontend.cluster, frontend.local])
        };
        let ranges = [Ranges::new(sizes.slots, taken(false)), Ranges::new(sizes.slots, taken(true))];
        let indices = held.frontends.values().map(|frontend| frontend.service);
        let indices = indices.map(|index| Range { base: index, len: 1 });
        let indices = Ranges::going_round(sizes.services, indices);
        let mut found = HashSet::new();
        for (id, frontend) in &held.frontends {
            // An empty list has no place: the base that it names is another's.
            for range in [frontend.cluster, frontend.local].into_iter().filter(|range| range.len > 0) {
                let (service, protocol) = (frontend.service, id.protocol);
                let endpoints = held.slots.get(&(id.address.is_ipv6(), range.base)).into_iter().flatten();
                let endpoints = endpoints.map(|endpoint| endpoint.address);
                found.extend(endpoints.map(|endpoint| GoneEndpoint { service, endpoint, protocol }));
            }
        }
        Self {
            held,
            ports: BTreeMap::new(),
            ranges,
            indices,
            found,
            first: true,
            cluster_ips: None,
            owners: HashMap::new(),
        }
    }

    /// Plans for the Service ports that changed; the first plan is for all of them, and for what is left over from
    /// an earlier agent.
    pub fn plan(
        &mut self,
        desired: &Desired,
        changed: &BTreeSet<ServicePortKey>,
        context: &Context<'_>,
    ) -> Plan {
        let mut plan = Plan::default();
        let mut before = HashSet::new();
        let keys: Vec<&ServicePortKey> =
            if self.first { desired.ports.keys().collect() } else { changed.iter().collect() };
        // Addresses that a changed Service gives up, unless another takes them over in the same plan.
        let mut given_up: BTreeSet<FrontendId> = BTreeSet::new();
        for key in &keys {
            if let Some(applied) = self.ports.get(key) {
                given_up.extend(ids(key, &applied.port));
                let (service, protocol) = (applied.index, key.protocol);
                let serving = applied.port.serving.iter();
                before.extend(serving.map(|endpoint| GoneEndpoint {
                    service,
                    endpoint: *endpoint,
                    protocol,
                }));
            }
        }
        if self.first {
            given_up.extend(self.held.frontends.keys().copied());
            before.extend(self.found.drain());
        }
        let mut vacated = Vec::new();
        for key in keys.iter().filter(|key| !desired.ports.contains_key(*key)) {
            vacated.extend(self.withdraw(key));
        }
        for key in &keys {
            let Some(port) = desired.ports.get(*key) else { continue };
            for id in ids(key, port) {
                given_up.remove(&id);
            }
            self.apply(key, port, context, &mut vacated, &mut plan);
        }
        for left in vacated {
            self.vacate(&left, context.now, &mut plan);
        }
        // While an address is known and its port is not, clients are refused: so it is known last and forgotten first.
        let same = self.cluster_ips.as_ref().is_some_and(|known| Arc::ptr_eq(known, &desired.cluster_ips));
        if !same {
            self.forget_cluster_ips(desired, &mut plan);
        }
        for range in self.held.service_cidrs.difference(&desired.service_cidrs) {
            plan.ops.push(Op::ServiceCidr(*range, false));
        }
        let mut left: HashMap<u32, usize> = HashMap::new();
        if self.first {
            for frontend in self.held.frontends.values() {
                *left.entry(frontend.service).or_default() += 1;
            }
        }
        for id in given_up {
            let Some(frontend) = self.held.frontends.remove(&id) else { continue };
            plan.ops.push(Op::Delete(id));
            if let Some(left) = left.get_mut(&frontend.service) {
                *left -= 1;
                if *left == 0 {
                    self.release_found(id, &frontend, context.now);
                }
            }
        }
        if self.first {
            // Of Service ports that are gone.
            let leftover =
                self.held.sources.iter().filter(|source| !self.owners.contains_key(&source.service));
            for source in leftover.copied().collect::<Vec<_>>() {
                self.held.sources.remove(&source);
                plan.last.push(Op::Forbid(source));
            }
            let leftover = self.held.names.keys().filter(|index| !self.owners.contains_key(index));
            for index in leftover.copied().collect::<Vec<_>>() {
                self.held.names.remove(&index);
                plan.last.push(Op::Unname(index));
            }
        }
        if !same {
            for address in desired.cluster_ips.keys() {
                if self.held.cluster_ips.insert(*address) {
                    plan.last.push(Op::ClusterIp(*address, true));
                }
            }
            self.cluster_ips = Some(Arc::clone(&desired.cluster_ips));
        }
        for range in desired.service_cidrs.difference(&self.held.service_cidrs) {
            plan.last.push(Op::ServiceCidr(*range, true));
        }
        self.held.service_cidrs.clone_from(&desired.service_cidrs);
        plan.ops.append(&mut plan.last);
        self.first = false;
        plan.gone = before.into_iter().filter(|endpoint| !self.is_serving(endpoint)).collect();
        plan
    }

    fn forget_cluster_ips(&mut self, desired: &Desired, plan: &mut Plan) {
        self.held.cluster_ips.retain(|address| {
            let known = desired.cluster_ips.contains_key(address);
            if !known {
                plan.ops.push(Op::ClusterIp(*address, false));
            }
            known
        });
    }

    /// ClusterIPs as they are after the last plan.
    pub fn cluster_ips(&self) -> &BTreeSet<IpAddr> {
        &self.held.cluster_ips
    }

    /// Ranges of ClusterIPs as they are after the last plan.
    pub fn service_cidrs(&self) -> &BTreeSet<IpNet> {
        &self.held.service_cidrs
    }

    /// Frontends as they are after the last plan.
    pub fn frontends(&self) -> &BTreeMap<FrontendId, Frontend> {
        &self.held.frontends
    }

    /// Whether the Service port names the endpoint as serving again, or still.
    pub fn is_serving(&self, endpoint: &GoneEndpoint) -> bool {
        let owner = self.owners.get(&endpoint.service).and_then(|key| self.ports.get(key));
        owner.is_some_and(|owner| owner.port.serving.contains(&endpoint.endpoint))
    }

    fn apply(
        &mut self,
        key: &ServicePortKey,
        port: &Arc<ServicePort>,
        context: &Context<'_>,
        vacated: &mut Vec<Vacated>,
        plan: &mut Plan,
    ) {
        let old = self.ports.remove(key);
        let adopted = old
            .as_ref()
            .map(|old| (old.index, old.cluster, old.local))
            .or_else(|| take_over(key, port, vacated))
            .or_else(|| self.adopt(key, port));
        let now = context.now;
        let index =
            adopted.map(|(index, ..)| index).or_else(|| self.indices.take(1, now).map(|range| range.base));
        let (old_cluster, old_local) =
            adopted.map_or_else(Default::default, |(_, cluster, local)| (cluster, local));
        // The node's own addresses need no route: the packet path could not tell them from a destination that has none.
        let placed = |endpoints: &[Endpoint]| -> Vec<Endpoint> {
            let own = |endpoint: &Endpoint| context.addresses.contains(&endpoint.address.ip());
            endpoints.iter().map(|e| Endpoint { local: e.local || own(e), ..*e }).collect()
        };
        let cluster = self.list(key.ipv6, old_cluster, &placed(&port.cluster), now, plan);
        let local = self.list(key.ipv6, old_local, &placed(&port.local), now, plan);
        let (Some(index), Some(cluster), Some(local)) = (index, cluster, local) else {
            // The old entries stay as they are: traffic of other Services goes on, and of this one to where it went.
            plan.no_room.push(key.clone());
            if let (Some(index), None) = (index, adopted) {
                self.indices.release(Range { base: index, len: 1 }, now);
            }
            for (range, old) in [(cluster, old_cluster), (local, old_local)] {
                if let Some(range) = range.filter(|range| *range != old) {
                    self.free(key.ipv6, range, now);
                }
            }
            let kept = old.or_else(|| {
                let (index, cluster, local) = adopted?;
                Some(Applied {
                    port: Arc::new(self.as_found(key, port, index, [cluster, local])),
                    index,
                    cluster,
                    local,
                })
            });
            if let Some(kept) = kept {
                self.owners.insert(kept.index, key.clone());
                self.ports.insert(key.clone(), kept);
            }
            return;
        };
        // Allowed before the frontends ask for it, forbidden after.
        let sources: BTreeSet<Source> = port
            .source_ranges
            .iter()
            .map(|range| Source { ipv6: key.ipv6, service: index, range: range.trunc() })
            .collect();
        for source in &sources {
            if self.held.sources.insert(*source) {
                plan.ops.push(Op::Allow(*source));
            }
        }
        let info = entry::info(key, port);
        if self.held.names.get(&index) != Some(&info) {
            plan.ops.push(Op::Name(index, Box::new(info)));
            self.held.names.insert(index, info);
        }
        for id_and_kind in &port.frontends {
            let id = FrontendId { address: id_and_kind.address, protocol: key.protocol };
            let held = self.held.frontends.get(&id).copied();
            let flags = entry::flags(port, id_and_kind.kind, context.addresses.contains(&id.address.ip()));
            let drain_until = entry::drain_until(port, id_and_kind.kind, flags, local.len, held, context);
            let affinity = entry::affinity(port);
            let wanted = Frontend { service: index, flags, cluster, local, drain_until, affinity, zero: 0 };
            if held != Some(wanted) {
                plan.ops.push(Op::Put(id, wanted));
                self.held.frontends.insert(id, wanted);
            }
        }
        for (old, new) in [(old_cluster, cluster), (old_local, local)] {
            if old != new {
                self.free(key.ipv6, old, now);
            }
        }
        for source in self.sources_of(key.ipv6, index) {
            if !sources.contains(&source) {
                self.held.sources.remove(&source);
                plan.last.push(Op::Forbid(source));
            }
        }
        self.owners.insert(index, key.clone());
        self.ports.insert(key.clone(), Applied { port: Arc::clone(port), index, cluster, local });
    }

    fn sources_of(&self, ipv6: bool, service: u32) -> Vec<Source> {
        // IPv4 networks sort before IPv6 ones.
        let first = Source { ipv6, service, range: Ipv4Net::default().into() };
        let from = self.held.sources.range(first..);
        from.take_while(|source| (source.ipv6, source.service) == (ipv6, service)).copied().collect()
    }
}

fn ids<'a>(key: &ServicePortKey, port: &'a ServicePort) -> impl Iterator<Item = FrontendId> + 'a {
    let protocol = key.protocol;
    port.frontends.iter().map(move |frontend| FrontendId { address: frontend.address, protocol })
}

#[cfg(test)]
mod tests;
