//! An index of the objects, and the desired state that follows from them, recomputed only where
//! something changed.

mod changes;
mod direct;
mod foreign;
mod leaving;
mod objects;
mod ports;
mod recent;
mod settle;
mod silent;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
};

use ipnet::IpNet;

pub use self::changes::Changes;
use super::{
    Desired, Excess, Reach, ServiceName, Warning,
    allocation::ForeignIps,
    conflicts::Claims,
    context::{Context, NodeInput},
    health_ports,
    object::{DirectNode, EndpointSlice, Node, Service, ServiceCidr},
    service_port::{self, Wanted},
    shares::Shares,
};

/// Every Service, EndpointSlice, Node and ServiceCIDR that a source has delivered.
///
/// Objects are stored by `apply`, `delete` and `reset`, which return whether anything changed in
/// the fields that matter. [`Index::update`] then brings the desired state up to date; its cost is
/// that of the Services that changed.
#[derive(Clone, Debug, Default)]
pub struct Index {
    services: BTreeMap<ServiceName, Service>,
    slices: BTreeMap<ServiceName, EndpointSlice>,
    /// The Service and the name of each slice. A set for each Service would take 544 bytes for one.
    slices_of: BTreeSet<(ServiceName, ServiceName)>,
    nodes: BTreeMap<String, Node>,
    /// Deleted Nodes in their last state, kept until the next update; and this node's own Node,
    /// which is kept longer: its machine still runs and its addresses are still its own, so traffic
    /// goes on.
    deleted_nodes: BTreeMap<String, Node>,
    service_cidrs: BTreeMap<String, ServiceCidr>,
    leaving: leaving::Announced,
    direct: BTreeMap<ServiceName, DirectNode>,
    /// See [`Self::direct_revision`].
    direct_revision: u64,
    /// The inputs from which the nodes that take part in direct forwarding were last judged.
    direct_judged: Option<direct::Inputs>,
    /// The number of such judgements, for tests.
    #[cfg(test)]
    direct_judgements: usize,
    recent: recent::Recent,
    synced: bool,

    dirty: BTreeSet<ServiceName>,
    /// Whether there may be Services that the source has not seen.
    blind: bool,
    foreign: ForeignIps,
    /// Addresses that Services of another proxy have gained or lost in this update.
    foreign_changed: BTreeSet<IpAddr>,
    /// Ranges of ClusterIPs from which the desired ones were computed; `None`: they must be
    /// computed again.
    asked_cidrs: Option<BTreeSet<IpNet>>,
    /// The number of Services examined because of such addresses, for tests.
    #[cfg(test)]
    looked_at: usize,
    context: Context,
    wanted: BTreeMap<ServiceName, Wanted>,
    claims: Claims,
    shares: Shares,
    /// Whether all objects were there when the shares were last judged.
    judged: bool,
    ports: health_ports::Claims,
    warnings: BTreeMap<ServiceName, BTreeSet<String>>,
    /// Warnings that concern no Service.
    node_warnings: BTreeSet<Warning>,
    desired: Desired,
}

/// A kind of object in an [`Index`].
pub trait Indexed: Sized {
    /// Adds or replaces an object. Returns whether anything that matters changed.
    fn apply(self, index: &mut Index) -> bool;
    /// Removes an object. Returns whether it was there.
    fn delete(name: &ServiceName, index: &mut Index) -> bool;
    /// Returns the namespace (empty if there is none) and the name.
    fn name(&self) -> ServiceName;
    /// Returns the names of all objects of this kind.
    fn names(index: &Index) -> Vec<ServiceName>;
    /// Whether the index holds this object with the same value in every field that matters.
    fn is_held(&self, index: &Index) -> bool;
}

impl Index {
    /// Adds or replaces an object. Returns whether anything that matters changed.
    pub fn apply<T: Indexed>(&mut self, object: T) -> bool {
        object.apply(self)
    }

    /// Removes an object; a Node or ServiceCIDR has the empty namespace. Returns whether it was
    /// there.
    pub fn delete<T: Indexed>(&mut self, name: &ServiceName) -> bool {
        T::delete(name, self)
    }

    /// Replaces all objects of one kind: objects that are not given are removed, except the
    /// `unreadable` ones, which exist but cannot be parsed and keep their last state. Returns
    /// whether anything that matters changed.
    pub fn reset<T: Indexed>(&mut self, objects: Vec<T>, unreadable: &[ServiceName]) -> bool {
        let mut keep: BTreeSet<_> = objects.iter().map(T::name).collect();
        keep.extend(unreadable.iter().cloned());
        let mut changed = false;
        for name in T::names(self) {
            if !keep.contains(&name) {
                changed |= T::delete(&name, self);
            }
        }
        for object in objects {
            changed |= object.apply(self);
        }
        changed
    }

    /// Notes that the source has delivered all objects once: from now on the desired state may be
    /// written.
    pub fn set_synced(&mut self) {
        self.synced = true;
    }

    /// Sets whether there may be Services that the source does not see now. In that case no address
    /// counts as unallocated. Returns whether this changed.
    pub fn set_blind(&mut self, blind: bool) -> bool {
        std::mem::replace(&mut self.blind, blind) != blind
    }

    /// Whether the desired state is complete. Before that it must not be written: an incomplete
    /// state would cut traffic.
    #[must_use]
    pub fn is_synced(&self) -> bool {
        self.synced
    }

    /// The addresses of a Node object, at most one of each family: the value `primary` for
    /// node-port addresses. Those of this node are remembered when its Node is deleted.
    #[must_use]
    pub fn node_addresses(&self, node_name: &str) -> &[IpAddr] {
        self.last_known_node(node_name).map_or(&[], |node| &node.addresses)
    }

    /// All internal and external addresses of a Node object. Those of this node are remembered when
    /// its Node is deleted.
    #[must_use]
    pub fn all_node_addresses(&self, node_name: &str) -> &[IpAddr] {
        self.last_known_node(node_name).map_or(&[], |node| &node.all_addresses)
    }

    /// The pod ranges that a Node object gives. Those of this node are remembered when its Node is
    /// deleted.
    #[must_use]
    pub fn pod_cidrs(&self, node_name: &str) -> &[IpNet] {
        self.last_known_node(node_name).map_or(&[], |node| &node.pod_cidrs)
    }

    fn last_known_node(&self, node_name: &str) -> Option<&Node> {
        self.nodes.get(node_name).or_else(|| self.deleted_nodes.get(node_name))
    }

    /// The desired state as of the last [`Index::update`].
    #[must_use]
    pub fn desired(&self) -> &Desired {
        &self.desired
    }

    /// All Services.
    pub fn services(&self) -> impl Iterator<Item = &Service> {
        self.services.values()
    }

    /// All Nodes.
    pub fn nodes(&self) -> impl Iterator<Item = &Node> {
        self.nodes.values()
    }

    /// The slices of a Service, in order of their names.
    pub fn slices_of(&self, service: &ServiceName) -> impl Iterator<Item = &EndpointSlice> {
        let from = self.slices_of.range((service.clone(), ServiceName::default())..);
        let of_service = from.take_while(move |(of, _)| of == service);
        of_service.filter_map(|(_, slice)| self.slices.get(slice))
    }

    /// Returns a Service that this proxy serves, as every node sees it.
    #[must_use]
    pub fn reach(&self, name: &ServiceName) -> Option<Reach<'_>> {
        let service = self.services.get(name).filter(|service| !service.foreign)?;
        let slices: Vec<_> = self.slices_of(name).collect();
        let mut reach = Reach::new(service, &slices);
        if self.is_health_port_refused(service) {
            reach.health = None;
        }
        Some(reach)
    }

    /// The warnings about a Service as of the last [`Index::update`].
    pub fn warnings_of(&self, name: &ServiceName) -> impl Iterator<Item = &str> {
        self.warnings.get(name).into_iter().flatten().map(String::as_str)
    }

    /// The number of warnings of each Service, as of the last [`Index::update`].
    pub fn warnings(&self) -> impl Iterator<Item = (&ServiceName, usize)> {
        self.warnings.iter().map(|(name, warnings)| (name, warnings.len()))
    }

    /// Brings the desired state up to date and returns what changed since the last call.
    pub fn update(&mut self, input: &NodeInput) -> Changes {
        self.update_with(input, &|| ())
    }

    /// Does the same as [`Index::update`] and calls `beat` for each Service that is examined: a
    /// sign of life while there are many Services, or large ones.
    pub fn update_with(&mut self, input: &NodeInput, beat: &dyn Fn()) -> Changes {
        let mut changes = Changes::default();
        // Before all objects are there, and when settings of this node change the demand of all
        // Services, the shares are judged by age and not by what is served now, which a restarted
        // agent could not know.
        let is_anew = self.update_node(input, &mut changes) || !self.judged;

        // A Service that shares a frontend with a changed Service gains or loses it.
        let mut settle = BTreeSet::new();
        for name in self.take_dirty() {
            beat();
            let mut wanted = self.wanted_by(&name);
            let old = self.wanted.get(&name).map(|old| old.created);
            let new = wanted.as_ref().map(|wanted| (wanted.created, wanted.demand));
            let is_out = self.shares.set(&name, old, new, &input.limits);
            if let Some(wanted) = wanted.as_mut().filter(|_| is_out) {
                self.refuse_beside_others(&name, wanted);
            }
            self.replace(name, wanted, &mut settle, &mut changes);
        }
        let admitted = if is_anew {
            self.judge_anew(input, &mut settle, &mut changes)
        } else {
            self.shares.judge(&input.limits)
        };
        for name in admitted {
            beat();
            let wanted = self.wanted_by(&name);
            self.replace(name, wanted, &mut settle, &mut changes);
        }
        self.judged = self.synced;
        self.touch_foreign(&mut settle);
        for name in settle {
            beat();
            self.settle(&name, &mut changes);
        }
        self.update_service_cidrs(input, &mut changes);
        changes
    }

    /// Takes the Services that changed: first the deleted ones, whose room others may get, then the
    /// oldest first.
    fn take_dirty(&mut self) -> Vec<ServiceName> {
        let dirty = std::mem::take(&mut self.dirty).into_iter();
        let created = |name: &ServiceName| Some(self.services.get(name)?.created.unwrap_or(i64::MAX));
        let mut dirty: Vec<_> = dirty.map(|name| (created(&name), name)).collect();
        dirty.sort_unstable();
        dirty.into_iter().map(|(_, name)| name).collect()
    }

    /// Judges the shares by age alone, and returns the Services that are admitted now but were left
    /// out before.
    fn judge_anew(
        &mut self,
        input: &NodeInput,
        settle: &mut BTreeSet<ServiceName>,
        changes: &mut Changes,
    ) -> Vec<ServiceName> {
        let mut admitted = Vec::new();
        for (name, is_out) in self.shares.judge_anew(&input.limits) {
            if !is_out {
                admitted.push(name);
            } else if let Some(mut left) = self.wanted.get(&name).map(Wanted::without_ports) {
                self.refuse_beside_others(&name, &mut left);
                self.replace(name, Some(left), settle, changes);
            }
        }
        admitted
    }

    /// Returns the desired state of a Service on its own; `None` if there is no such Service.
    fn wanted_by(&self, name: &ServiceName) -> Option<Wanted> {
        let service = self.services.get(name)?;
        let slices: Vec<_> = self.slices_of(name).collect();
        let mut wanted = service_port::wanted(service, &slices, &self.context);
        if self.is_recent(name) {
            wanted.name_endpoints();
        }
        Some(wanted)
    }

    /// Refuses a Service because other Services leave no room for it, unless it is refused already.
    fn refuse_beside_others(&self, name: &ServiceName, wanted: &mut Wanted) {
        if let (None, Some(service)) = (&wanted.refused, self.services.get(name)) {
            wanted.refuse(name, Excess::beside_others(self.context.served_ports(service)));
        }
    }

    /// Updates what depends on the node. Returns whether all Services must be examined again.
    fn update_node(&mut self, input: &NodeInput, changes: &mut Changes) -> bool {
        self.deleted_nodes.retain(|name, _| *name == input.node_name);
        self.leaving.leave_out(&input.node_name);
        self.avoid_leaving();
        self.note_direct_nodes(input, changes);
        let last_known = self.last_known_node(&input.node_name);
        let context = Context {
            // note_direct_nodes has applied them, and marked the Services that they concern.
            input: NodeInput { ways: Arc::default(), ..input.clone() },
            zone: last_known.and_then(|node| node.zone.clone()),
            primary: last_known.map(|node| node.addresses.clone()).unwrap_or_default(),
            numbers: Arc::clone(&self.context.numbers),
            silent: Arc::clone(&self.context.silent),
            leaving: Arc::clone(&self.context.leaving),
            direct: Arc::clone(&self.context.direct),
        };
        let node = self.nodes.get(&input.node_name);
        let eligible = node.is_some_and(|node| !node.leaving);
        let missing = node.is_none().then(|| {
            format!(
                "There is no Node {:?}: no endpoint counts as local unless this is the name that endpoints carry, \
                 and /healthz says 503 (see --node-name).",
                input.node_name
            )
        });
        let problems = node.into_iter().flat_map(|node| &node.problems);
        let problems = problems.chain(self.service_cidrs.values().flat_map(|object| &object.problems));
        let texts = missing.into_iter().chain(problems.cloned());
        let warnings: BTreeSet<_> = texts.map(|text| Warning { service: None, text }).collect();
        let is_other = self.context != context;
        if is_other {
            self.context = context;
            self.dirty.extend(self.services.keys().cloned());
        }
        if self.desired.node_eligible != eligible {
            self.desired.node_eligible = eligible;
            changes.node_eligible = true;
        }
        if self.node_warnings != warnings {
            changes.warnings = true;
            changes.warned.extend(warnings.difference(&self.node_warnings).cloned());
            for old in &self.node_warnings {
                self.desired.warnings.remove(old);
            }
            self.desired.warnings.extend(warnings.iter().cloned());
            self.node_warnings = warnings;
        }
        is_other
    }

    /// Records what one Service wants, and the Services that this affects.
    fn replace(
        &mut self,
        name: ServiceName,
        wanted: Option<Wanted>,
        settle: &mut BTreeSet<ServiceName>,
        changes: &mut Changes,
    ) {
        let old = self.wanted.remove(&name);
        let cluster_ips = |wanted: &Option<Wanted>| {
            wanted.as_ref().map(|wanted| wanted.cluster_ips.clone()).unwrap_or_default()
        };
        self.replace_cluster_ips(&cluster_ips(&old), &cluster_ips(&wanted), changes);
        let foreign = |wanted: &Option<Wanted>| {
            wanted.as_ref().map(|wanted| wanted.foreign_ips.clone()).unwrap_or_default()
        };
        self.replace_foreign(&name, &foreign(&old), &foreign(&wanted));
        if let Some(old) = old {
            self.ports.remove(old.created, &name, &old.uses, settle);
            for (key, port) in &old.ports {
                for frontend in &port.frontends {
                    self.claims.remove(old.created, key, *frontend, settle);
                }
            }
        }
        if let Some(wanted) = wanted {
            self.ports.add(wanted.created, &name, &wanted.uses, settle);
            for (key, port) in &wanted.ports {
                for frontend in &port.frontends {
                    self.claims.add(wanted.created, key, *frontend, settle);
                }
            }
            self.wanted.insert(name.clone(), wanted);
        }
        settle.insert(name);
    }

    fn replace_cluster_ips(&mut self, old: &[IpAddr], new: &[IpAddr], changes: &mut Changes) {
        if old == new {
            return;
        }
        let counts = &mut self.desired.cluster_ips;
        for address in new {
            let count = counts.entry(*address).or_default();
            if *count == 0 {
                changes.cluster_ips.insert(*address);
            }
            *count += 1;
        }
        for address in old {
            if let Some(count) = counts.get_mut(address) {
                *count -= 1;
                if *count == 0 {
                    changes.cluster_ips.insert(*address);
                    counts.remove(address);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
