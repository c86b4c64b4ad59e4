//! The objects, and the desired state that follows from them, recomputed only where something changed.

mod foreign;
mod objects;
mod ports;
mod settle;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use ipnet::IpNet;

use super::{
    Desired, Reach, ServiceName, ServicePortKey, Warning,
    allocation::ForeignIps,
    conflicts::Claims,
    context::{Context, NodeInput},
    health_ports,
    limits::Excess,
    object::{EndpointSlice, Node, Service, ServiceCidr},
    service_port::{self, Wanted},
    shares::Shares,
};

/// Changes of the desired state by a call of [`Index::update`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Changes {
    /// Service ports that were added, changed or removed.
    pub ports: BTreeSet<ServicePortKey>,
    /// Cluster IPs that came or went, or went and came again.
    pub cluster_ips: BTreeSet<IpAddr>,
    /// Which Services ask for more than the maps can hold.
    pub refused: bool,
    /// Services whose health check was added, changed or removed.
    pub health: BTreeSet<ServiceName>,
    pub node_eligible: bool,
    pub service_cidrs: bool,
    pub warnings: bool,
    /// Warnings that were added.
    pub warned: BTreeSet<Warning>,
}

impl Changes {
    /// Nothing is to be done.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Adds earlier changes that were not written to the maps. Their warnings have been told.
    pub fn add_unwritten(&mut self, earlier: Self) {
        self.ports.extend(earlier.ports);
        self.cluster_ips.extend(earlier.cluster_ips);
        self.health.extend(earlier.health);
        self.refused |= earlier.refused;
    }
}

/// Every Service, EndpointSlice, Node and ServiceCIDR that a source told of.
///
/// Objects go in by `apply`, `delete` and `reset`, which say whether anything changed in the fields that matter.
/// [`Index::update`] then brings the desired state up to date; its cost is that of the Services that changed.
#[derive(Clone, Debug, Default)]
pub struct Index {
    services: BTreeMap<ServiceName, Service>,
    slices: BTreeMap<ServiceName, EndpointSlice>,
    slices_of: BTreeMap<ServiceName, BTreeSet<ServiceName>>,
    nodes: BTreeMap<String, Node>,
    /// Nodes that were deleted, as they were last, until the next update; and the own Node: its machine still runs, and its
    /// addresses are still its own, so traffic goes on.
    deleted_nodes: BTreeMap<String, Node>,
    service_cidrs: BTreeMap<String, ServiceCidr>,
    synced: bool,

    dirty: BTreeSet<ServiceName>,
    /// Whether every Service that there is has been seen, as far as the source knows.
    blind: bool,
    foreign: ForeignIps,
    /// Addresses that another proxy's Services have gained or lost in this update.
    foreign_changed: BTreeSet<IpAddr>,
    /// Ranges of ClusterIPs that the desired ones were taken from; `None`: to be taken anew.
    asked_cidrs: Option<BTreeSet<IpNet>>,
    /// Services that were looked at for the sake of such addresses, for tests.
    #[cfg(test)]
    looked_at: usize,
    context: Context,
    wanted: BTreeMap<ServiceName, Wanted>,
    claims: Claims,
    shares: Shares,
    /// All objects were there when the shares were last judged.
    judged: bool,
    ports: health_ports::Claims,
    warnings: BTreeMap<ServiceName, BTreeSet<String>>,
    /// Those that are about no Service.
    node_warnings: BTreeSet<Warning>,
    desired: Desired,
}

/// One kind of object within an [`Index`].
pub trait Indexed: Sized {
    /// Adds or replaces an object. Returns whether anything that matters changed.
    fn apply(self, index: &mut Index) -> bool;
    /// Removes an object. Returns whether it was there.
    fn delete(name: &ServiceName, index: &mut Index) -> bool;
    /// Namespace (empty if it has none) and name.
    fn name(&self) -> ServiceName;
    /// The names of all objects of this kind.
    fn names(index: &Index) -> Vec<ServiceName>;
    /// Whether it is there, the same in all that matters.
    fn is_held(&self, index: &Index) -> bool;
}

impl Index {
    /// Adds or replaces an object. Returns whether anything that matters changed.
    pub fn apply<T: Indexed>(&mut self, object: T) -> bool {
        object.apply(self)
    }

    /// Removes an object; a Node or ServiceCIDR has the empty namespace. Returns whether it was there.
    pub fn delete<T: Indexed>(&mut self, name: &ServiceName) -> bool {
        T::delete(name, self)
    }

    /// Replaces all objects of one kind: those not given are removed, except the `unreadable` ones, which exist but
    /// cannot be understood and stay as they were last. Returns whether anything that matters changed.
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

    /// Says that the source has given all objects once: from now on the desired state may be written.
    pub fn set_synced(&mut self) {
        self.synced = true;
    }

    /// Says whether there may be Services that the source does not see now. Then no address counts as unallocated. Returns
    /// whether that is news.
    pub fn set_blind(&mut self, blind: bool) -> bool {
        std::mem::replace(&mut self.blind, blind) != blind
    }

    /// Whether the desired state is whole. Before, it must not be written: half-known it would cut traffic.
    #[must_use]
    pub fn is_synced(&self) -> bool {
        self.synced
    }

    /// The addresses of a Node object, at most one of each family: what node-port addresses `primary` means. Those of
    /// this node are remembered when it is deleted.
    #[must_use]
    pub fn node_addresses(&self, node_name: &str) -> &[IpAddr] {
        self.last_known_node(node_name).map_or(&[], |node| &node.addresses)
    }

    /// All internal and external addresses of a Node object. Those of this node are remembered.
    #[must_use]
    pub fn all_node_addresses(&self, node_name: &str) -> &[IpAddr] {
        self.last_known_node(node_name).map_or(&[], |node| &node.all_addresses)
    }

    /// The ranges of a Node's own pods, as its Node object gives them. Those of this node are remembered.
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

    /// Every Service that there is.
    pub fn services(&self) -> impl Iterator<Item = &Service> {
        self.services.values()
    }

    /// Every Node that there is.
    pub fn nodes(&self) -> impl Iterator<Item = &Node> {
        self.nodes.values()
    }

    /// The slices of a Service, by their names.
    pub fn slices_of(&self, service: &ServiceName) -> impl Iterator<Item = &EndpointSlice> {
        self.slices_of.get(service).into_iter().flatten().filter_map(|slice| self.slices.get(slice))
    }

    /// A Service that this proxy serves, as every node sees it.
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

    /// Number of warnings of each Service, as of the last [`Index::update`].
    pub fn warnings(&self) -> impl Iterator<Item = (&ServiceName, usize)> {
        self.warnings.iter().map(|(name, warnings)| (name, warnings.len()))
    }

    /// Brings the desired state up to date and says what changed in it since the last call.
    pub fn update(&mut self, input: &NodeInput) -> Changes {
        self.update_with(input, &|| ())
    }

    /// The same; `beat` is called for each Service that is looked at: as a sign of life, where there are many, or large ones.
    pub fn update_with(&mut self, input: &NodeInput, beat: &dyn Fn()) -> Changes {
        let mut changes = Changes::default();
        // Not by what is served, which a restart could not know: before all objects are there, and where this node's own
        // settings change what all of them ask for.
        let is_anew = self.update_node(input, &mut changes) || !self.judged;

        // Whoever shares a frontend with a changed Service gains or loses it.
        let mut settle = BTreeSet::new();
        for name in self.take_dirty() {
            beat();
            let mut wanted = self.wanted_by(&name);
            let old = self.wanted.get(&name).map(|old| old.created);
            let new = wanted.as_ref().map(|wanted| (wanted.created, wanted.demand));
            let is_out = self.shares.set(&name, old, new, &input.limits);
            if let Some(wanted) = wanted.as_mut().filter(|_| is_out) {
                self.leave_out(&name, wanted);
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

    /// The Services that changed: those that are gone, whose room others may have, then the oldest first.
    fn take_dirty(&mut self) -> Vec<ServiceName> {
        let dirty = std::mem::take(&mut self.dirty).into_iter();
        let created = |name: &ServiceName| Some(self.services.get(name)?.created.unwrap_or(i64::MAX));
        let mut dirty: Vec<_> = dirty.map(|name| (created(&name), name)).collect();
        dirty.sort_unstable();
        dirty.into_iter().map(|(_, name)| name).collect()
    }

    /// Leaves Services out by their age alone, and returns those that are not left out any more.
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
                self.leave_out(&name, &mut left);
                self.replace(name, Some(left), settle, changes);
            }
        }
        admitted
    }

    /// The desired state of a Service by itself; `None` if there is no such Service.
    fn wanted_by(&self, name: &ServiceName) -> Option<Wanted> {
        let service = self.services.get(name)?;
        let slices: Vec<_> = self.slices_of(name).collect();
        Some(service_port::wanted(service, &slices, &self.context))
    }

    /// Refuses a Service for want of room beside others, unless it is refused already.
    fn leave_out(&self, name: &ServiceName, wanted: &mut Wanted) {
        if let (None, Some(service)) = (&wanted.refused, self.services.get(name)) {
            wanted.refuse(name, Excess::beside_others(service, &self.context));
        }
    }

    /// Returns whether all Services are to be looked at anew.
    fn update_node(&mut self, input: &NodeInput, changes: &mut Changes) -> bool {
        self.deleted_nodes.retain(|name, _| *name == input.node_name);
        let last_known = self.last_known_node(&input.node_name);
        let context = Context {
            input: input.clone(),
            zone: last_known.and_then(|node| node.zone.clone()),
            primary: last_known.map(|node| node.addresses.clone()).unwrap_or_default(),
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

    /// Takes note of what one Service wants, and of whom that touches.
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
