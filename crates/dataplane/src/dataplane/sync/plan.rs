//! The difference between the content of the maps and the desired state, as the writes to make and
//! their order, with no side effects.
//!
//! The order makes each step safe: slots of a new range, then the frontends that point to them
//! (each one an atomic replacement), then deletions. A list that did not change keeps its range, so
//! a change of one Service writes only that Service, and an agent that takes over the maps writes
//! only what changed. A Service port that finds no room is the only one left out.

mod frontends;
mod history;
mod takeover;
mod usage;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::{Duration, Instant},
};

use ipnet::IpNet;
use traffic_policy_cluster::model::{
    Changes, Desired, Endpoint, Protocol, ServicePort, ServicePortKey, maglev::TableSize,
};
use traffic_policy_ebpf::abi::{Frontend, IndexRange};

pub use self::usage::Usage;
use self::{
    frontends::sources,
    takeover::{Place, Vacated, take_over},
    usage::Demands,
};
use super::{
    alloc::EndpointLists,
    budget::{Budget, Capacity, Lack, LeftOut},
    former::Former,
    op::{Held, Op},
    ranges::Ranges,
    tables::{ReadTable, Table, Tables},
};
use crate::dataplane::maps::keys::{FrontendId, Removal, RemovedEndpoint};

/// Whether the endpoint's node opens packets, of new flows or of connections that go on alone.
fn is_opened(endpoint: &Endpoint) -> bool {
    endpoint.opens.or(endpoint.held).is_some()
}

/// Returns the endpoints that may have direct flows of UDP.
fn directly(key: &ServicePortKey, port: &ServicePort) -> impl Iterator<Item = SocketAddr> {
    let is_direct = key.protocol == Protocol::Udp && port.forwarding.is_direct();
    let endpoints = if is_direct { port.cluster.as_slice() } else { &[] };
    endpoints.iter().filter(|endpoint| is_opened(endpoint)).map(|endpoint| endpoint.address)
}

/// The endpoints that flows may have, before a plan.
#[derive(Debug, Default)]
struct Serving {
    all: HashSet<RemovedEndpoint>,
    /// Those of [`directly`].
    directly: HashSet<RemovedEndpoint>,
}

/// The written state, and the free entries.
#[derive(Debug)]
pub struct Planner {
    held: Held,
    ports: BTreeMap<ServicePortKey, Applied>,
    lists: EndpointLists,
    tables: Tables,
    indices: Ranges,
    budget: Budget,
    /// The endpoints in the maps as they were found, until the first plan has compared them.
    found: Serving,
    first: bool,
    /// The ClusterIPs that found no room.
    unnamed: BTreeSet<IpAddr>,
    /// The time of CLOCK_MONOTONIC, in nanoseconds, from which on former owners may be asked no
    /// longer: no Service port has any that are to be forgotten before.
    forget_at: u64,
    /// The number of ClusterIPs that were examined, for tests.
    #[cfg(test)]
    looked_at: usize,
    /// The number of Service ports whose former owners were examined, for tests.
    #[cfg(test)]
    examined: usize,
    /// The Service ports by their index in `ports`.
    owners: HashMap<u32, ServicePortKey>,
}

#[derive(Clone, Debug)]
struct Applied {
    port: Arc<ServicePort>,
    index: u32,
    cluster: IndexRange,
    local: IndexRange,
    table: Table,
    former: Former,
}

/// The operations for one change of the desired state.
#[derive(Debug, Default)]
pub struct Plan {
    pub ops: Vec<Op>,
    /// The endpoints that accept no new flows of their Service port.
    pub removed: BTreeMap<RemovedEndpoint, Removal>,
    /// The Service ports for which the maps have no room.
    pub left_out: Vec<LeftOut>,
    /// The operations that belong at the end of `ops`.
    last: Vec<Op>,
}

/// The inputs of the plan in addition to the desired state.
#[derive(Clone)]
pub struct Context<'a> {
    /// Reads a table in the maps.
    pub tables: &'a ReadTable<'a>,
    /// All addresses of this node.
    pub addresses: &'a BTreeSet<IpAddr>,
    /// The drain time of Services without an annotation of their own.
    pub drain: Duration,
    /// The time of CLOCK_MONOTONIC, in nanoseconds.
    pub monotonic: u64,
    pub now: Instant,
    /// Whether the connections of an earlier proxy are about to be adopted.
    pub adopting: bool,
    /// The slots of Maglev tables.
    pub table_size: TableSize,
    /// Whether there are programs for SCTP: without them no frontend of it is written.
    pub sctp: bool,
}

impl Planner {
    /// Starts from the content of the maps.
    pub fn new(mut held: Held, capacity: Capacity) -> Self {
        let budget = Budget::new(&capacity, &held);
        let indices = held.frontends.values().map(|frontend| frontend.service);
        let indices = indices.map(|index| IndexRange { base: index, len: 1 });
        let indices = Ranges::round_robin(capacity.services, indices);
        let mut found = Serving::default();
        for (id, frontend) in &held.frontends {
            // An empty list has no place: the base that it names belongs to another.
            for range in [frontend.cluster, frontend.local].into_iter().filter(|range| range.len > 0) {
                let (service, protocol) = (frontend.service, id.protocol);
                let endpoints = held.slots.get(&(id.address.is_ipv6(), range.base)).into_iter().flatten();
                for held in endpoints {
                    let endpoint = RemovedEndpoint { service, endpoint: held.address, protocol };
                    found.all.insert(endpoint);
                    if protocol == Protocol::Udp && is_opened(held) {
                        found.directly.insert(endpoint);
                    }
                }
            }
        }
        let frontends = held.frontends.iter().map(|(id, frontend)| (id.address.is_ipv6(), frontend));
        let tables = Tables::new(capacity.tables, held.frontends.values());
        let lists = EndpointLists::new(std::mem::take(&mut held.slots), capacity.slots, frontends);
        Self {
            held,
            ports: BTreeMap::new(),
            lists,
            tables,
            indices,
            budget,
            found,
            first: true,
            unnamed: BTreeSet::new(),
            forget_at: u64::MAX,
            #[cfg(test)]
            looked_at: 0,
            #[cfg(test)]
            examined: 0,
            owners: HashMap::new(),
        }
    }

    /// Plans for the Service ports and ClusterIPs that changed; the first plan covers all of them,
    /// and the leftovers of an earlier agent.
    pub fn plan(&mut self, desired: &Desired, changes: &Changes, context: &Context<'_>) -> Plan {
        let mut plan = Plan::default();
        self.lists.begin();
        self.tables.begin(context.now);
        let mut before = Serving::default();
        let expired = if self.first { BTreeSet::new() } else { self.expired(desired, context.monotonic) };
        let keys: Vec<&ServicePortKey> =
            if self.first { desired.ports.keys().collect() } else { changes.ports.union(&expired).collect() };
        // A changed Service gives up these addresses, unless another takes them over in the same
        // plan.
        let mut given_up: BTreeSet<FrontendId> = BTreeSet::new();
        for key in &keys {
            if let Some(applied) = self.ports.get(key) {
                // Addresses that another Service has taken over since are excluded.
                let owned = |id: &FrontendId| {
                    self.held.frontends.get(id).is_some_and(|held| held.service == applied.index)
                };
                given_up.extend(ids(key, &applied.port).filter(owned));
                let (service, protocol) = (applied.index, key.protocol);
                let named = |endpoint: SocketAddr| RemovedEndpoint { service, endpoint, protocol };
                before.all.extend(applied.port.serving.iter().copied().map(named));
                before.directly.extend(directly(key, &applied.port).map(named));
            }
        }
        if self.first {
            given_up.extend(self.held.frontends.keys().copied());
            before = std::mem::take(&mut self.found);
        }
        let demands = Demands::of(desired, &keys);
        let mut vacated = Vec::new();
        for key in keys.iter().filter(|key| !desired.ports.contains_key(*key)) {
            vacated.extend(self.withdraw(key));
        }
        for key in &keys {
            let Some(port) = desired.ports.get(*key) else { continue };
            for id in ids(key, port) {
                given_up.remove(&id);
            }
            self.apply(key, port, context, &demands, &mut vacated, &mut plan);
        }
        for left in vacated {
            self.vacate(&left, context.now, &mut plan);
        }
        // While an address is known and its port is not, clients are rejected: an address therefore
        // becomes known last and is forgotten first.
        let cluster_ips = self.concerned_cluster_ips(desired, changes);
        self.forget_cluster_ips(&cluster_ips, desired, &mut plan);
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
            self.budget.frontends.remove(id.address.is_ipv6());
            plan.ops.push(Op::DeleteFrontend(id));
            if let Some(left) = left.get_mut(&frontend.service) {
                *left -= 1;
                if *left == 0 {
                    self.release_found(id, &frontend, context.now);
                }
            }
        }
        if self.first {
            self.forget_leftovers(&mut plan);
        }
        // Other Service ports may have freed entries by now.
        for LeftOut { key, .. } in std::mem::take(&mut plan.left_out) {
            if let Some(port) = desired.ports.get(&key) {
                self.apply(&key, port, context, &demands, &mut Vec::new(), &mut plan);
            }
        }
        self.name_cluster_ips(&cluster_ips, desired, &mut plan);
        for range in desired.service_cidrs.difference(&self.held.service_cidrs) {
            plan.last.push(Op::ServiceCidr(*range, true));
        }
        self.held.service_cidrs.clone_from(&desired.service_cidrs);
        for op in &plan.last {
            // Their entries are free for others only from now on.
            if let Op::RemoveSourceRange(source) = op {
                self.budget.source_ranges.remove(source.ipv6);
            }
        }
        plan.ops.append(&mut plan.last);
        self.first = false;
        // Those that go on are taken out by one pass: a list may have thousands of endpoints, and
        // `is_serving` looks through it for each.
        for key in &keys {
            let Some(Applied { port, index, .. }) = self.ports.get(*key) else { continue };
            for endpoint in directly(key, port) {
                let (service, protocol) = (*index, key.protocol);
                before.directly.remove(&RemovedEndpoint { service, endpoint, protocol });
            }
        }
        // No endpoint has both reasons: the second one is only that of endpoints that still serve.
        for (endpoints, from) in [(before.all, Removal::Service), (before.directly, Removal::Opening)] {
            let removed = endpoints.into_iter().filter(|endpoint| !self.is_serving(endpoint, from));
            plan.removed.extend(removed.map(|endpoint| (endpoint, from)));
        }
        plan
    }

    /// Returns the ClusterIPs after the last plan.
    pub fn cluster_ips(&self) -> &BTreeSet<IpAddr> {
        &self.held.cluster_ips
    }

    /// Returns the ranges of ClusterIPs after the last plan.
    pub fn service_cidrs(&self) -> &BTreeSet<IpNet> {
        &self.held.service_cidrs
    }

    /// Returns the frontends after the last plan.
    pub fn frontends(&self) -> &BTreeMap<FrontendId, Frontend> {
        &self.held.frontends
    }

    /// Returns the index of a Service port; `None` if it found no room.
    pub fn index_of(&self, key: &ServicePortKey) -> Option<u32> {
        self.ports.get(key).map(|applied| applied.index)
    }

    /// Whether the endpoint does again, or still, what it was named for: for that of a direct flow,
    /// whether its node opens packets. Where the Service port is not forwarded directly any more,
    /// flows keep the way that they began with; and what has left the Service altogether is named
    /// for that.
    pub fn is_serving(&self, removed: &RemovedEndpoint, from: Removal) -> bool {
        let owner = self.owners.get(&removed.service).and_then(|key| self.ports.get(key));
        let serves = owner.is_some_and(|owner| owner.port.serving.contains(&removed.endpoint));
        match (from, owner) {
            (Removal::Service, _) => serves,
            (Removal::Opening, Some(owner)) if serves && owner.port.forwarding.is_direct() => {
                let found = owner.port.cluster.iter().find(|endpoint| endpoint.address == removed.endpoint);
                found.is_some_and(is_opened)
            }
            (Removal::Opening, _) => true,
        }
    }

    fn apply(
        &mut self,
        key: &ServicePortKey,
        port: &Arc<ServicePort>,
        context: &Context<'_>,
        demands: &Demands<'_>,
        vacated: &mut Vec<Vacated>,
        plan: &mut Plan,
    ) {
        let old = self.ports.remove(key);
        let adopted = old
            .as_ref()
            .map(Applied::place)
            .or_else(|| take_over(key, port, vacated))
            .or_else(|| self.adopt(key, port));
        let lack = if key.protocol == Protocol::Sctp && !context.sctp {
            Some(Lack::Programs)
        } else {
            self.lack(key, port, adopted.map(|place| place.index), demands)
        };
        if let Some(lack) = lack {
            self.leave_out(key, port, lack, old, adopted, plan);
            return;
        }
        let now = context.now;
        let index =
            adopted.map(|place| place.index).or_else(|| self.indices.take(1, now).map(|range| range.base));
        let old_place = adopted.unwrap_or_default();
        let Place { cluster: old_cluster, local: old_local, table: old_table, .. } = old_place;
        // The node's own addresses need no route: the packet path could not distinguish them from a
        // destination that has none.
        // Weights are in the table alone: lists differ by what is in the slots.
        let placed = |endpoints: &[Endpoint]| -> Vec<Endpoint> {
            let own = |endpoint: &Endpoint| context.addresses.contains(&endpoint.address.ip());
            let placed = endpoints.iter().map(|e| match own(e) {
                true => Endpoint::new(e.address, true),
                false => Endpoint { weight: 1, ..*e },
            });
            placed.collect()
        };
        let cluster = self.lists.place(key.ipv6, old_cluster, &placed(&port.cluster), now, &mut plan.ops);
        let local = self.lists.place(key.ipv6, old_local, &placed(&port.local), now, &mut plan.ops);
        let (Some(index), Some(cluster), Some(local)) = (index, cluster, local) else {
            let lack =
                if index.is_none() { Lack::Indices } else { Lack::Endpoints { needed: port.cluster.len() } };
            // The old entries stay as they are: traffic of other Services continues, and that of
            // this one goes where it went before.
            if let (Some(index), None) = (index, adopted) {
                self.indices.release(IndexRange { base: index, len: 1 }, now);
            }
            for (range, old) in [(cluster, old_cluster), (local, old_local)] {
                if let Some(range) = range.filter(|range| *range != old) {
                    self.lists.free(key.ipv6, range, now);
                }
            }
            self.leave_out(key, port, lack, old, adopted, plan);
            return;
        };
        // The endpoints of a Service port whose table finds no room are chosen at random.
        let size = context.table_size;
        let table =
            self.tables.place(old_table, key, port, size, now, &mut plan.ops).unwrap_or_else(|lack| {
                plan.left_out.push(LeftOut::new(key, lack, &port.local, &port.local));
                Table::default()
            });
        let former = self.keep_former(key, port, (&old_place, cluster, table), context, plan);
        let applied = Applied { port: Arc::clone(port), index, cluster, local, table, former };
        let sources = sources(key, port, index);
        self.write_frontends(key, &applied, &sources, context, plan);
        for (old, new) in [(old_cluster, cluster), (old_local, local)] {
            if old != new {
                self.lists.free(key.ipv6, old, now);
            }
        }
        if old_table.range != table.range {
            self.tables.free(old_table, now);
        }
        if old_place.former.tables != former.tables {
            self.free_former(key.ipv6, &old_place.former, now);
        }
        for source in self.sources_of(key.ipv6, index) {
            if !sources.contains(&source) {
                self.remove_source(source, plan);
            }
        }
        self.record(key, applied);
    }

    /// Records what is in the maps for a Service port.
    fn record(&mut self, key: &ServicePortKey, applied: Applied) {
        if applied.former.tables.len > 0 {
            self.forget_at = self.forget_at.min(applied.former.until);
        }
        self.owners.insert(applied.index, key.clone());
        self.ports.insert(key.clone(), applied);
    }

    /// Notes that the last plan is in the maps: no frontend names what it freed.
    pub fn written(&mut self, now: Instant) {
        self.tables.written(now);
    }

    /// Returns the time for which the next plan should wait, so that slots freed by this one can be
    /// used again.
    pub fn pause(&self) -> Duration {
        self.lists.pause().max(self.tables.pause())
    }

    /// Whether the next plan compares everything with the content of the maps.
    pub fn is_first(&self) -> bool {
        self.first
    }
}

fn ids<'a>(key: &ServicePortKey, port: &'a ServicePort) -> impl Iterator<Item = FrontendId> + 'a {
    let protocol = key.protocol;
    port.frontends.iter().map(move |frontend| FrontendId { address: frontend.address, protocol })
}

#[cfg(test)]
mod tests;
