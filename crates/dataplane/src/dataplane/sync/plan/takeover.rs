//! Take-over of an index and ranges, from an earlier agent and from a removed Service port, and the
//! release of those that are not taken over.

use std::{sync::Arc, time::Instant};

use traffic_policy_cluster::model::{ServicePort, ServicePortKey};
use traffic_policy_ebpf::abi::{Frontend, IndexRange};

use super::{
    super::{
        budget::{Lack, LeftOut},
        former::Former,
        op::Op,
        tables::Table,
    },
    Applied, Plan, Planner, ids,
};
use crate::dataplane::maps::keys::FrontendId;

/// The index, the list for policy Cluster, the list for policy Local, the table, and its history.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Place {
    pub(super) index: u32,
    pub(super) cluster: IndexRange,
    pub(super) local: IndexRange,
    pub(super) table: Table,
    pub(super) former: Former,
}

impl Applied {
    pub(super) fn place(&self) -> Place {
        let Self { index, cluster, local, table, former, .. } = *self;
        Place { index, cluster, local, table, former }
    }
}

impl Planner {
    /// Returns the index and ranges of an earlier agent for this Service port, found by its
    /// frontends.
    pub(super) fn adopt(&self, key: &ServicePortKey, port: &ServicePort) -> Option<Place> {
        if !self.first {
            return None;
        }
        ids(key, port)
            .filter_map(|id| self.held.frontends.get(&id))
            .find(|frontend| !self.owners.contains_key(&frontend.service))
            .map(|frontend| Place {
                index: frontend.service,
                cluster: frontend.cluster,
                local: frontend.local,
                table: Table::of(frontend),
                former: Former::of(frontend),
            })
    }

    /// Returns a Service port as an earlier agent left it: those of its frontends and endpoints
    /// that the maps hold.
    pub(super) fn as_found(
        &self,
        key: &ServicePortKey,
        port: &ServicePort,
        index: u32,
        lists: [IndexRange; 2],
    ) -> ServicePort {
        let held = |id: FrontendId| self.held.frontends.get(&id).is_some_and(|held| held.service == index);
        let frontends = port
            .frontends
            .iter()
            .filter(|frontend| held(FrontendId { address: frontend.address, protocol: key.protocol }));
        let endpoints = lists.iter().filter(|list| list.len > 0);
        let endpoints = endpoints.flat_map(|list| self.lists.get(key.ipv6, *list));
        ServicePort {
            frontends: frontends.copied().collect(),
            serving: endpoints.map(|endpoint| endpoint.address).collect(),
            ..port.clone()
        }
    }

    /// Frees the entries of the last frontend of an earlier agent's Service port, unless it was
    /// adopted.
    pub(super) fn release_found(&mut self, id: FrontendId, frontend: &Frontend, now: Instant) {
        let ipv6 = id.address.is_ipv6();
        if self.owners.contains_key(&frontend.service) {
            return;
        }
        self.indices.release(IndexRange { base: frontend.service, len: 1 }, now);
        for range in [frontend.cluster, frontend.local] {
            if self.lists.holds(ipv6, range) {
                self.lists.free(ipv6, range, now);
            }
        }
        self.tables.free(Table::of(frontend), now);
        self.free_former(ipv6, &Former::of(frontend), now);
    }

    /// Withdraws a Service port; its index and ranges may be taken over in the same plan.
    pub(super) fn withdraw(&mut self, key: &ServicePortKey) -> Option<Vacated> {
        let applied = self.ports.remove(key)?;
        self.owners.remove(&applied.index);
        Some(Vacated { key: key.clone(), applied })
    }

    /// Releases indices and ranges that were not taken over.
    pub(super) fn vacate(&mut self, left: &Vacated, now: Instant, plan: &mut Plan) {
        let (ipv6, old) = (left.key.ipv6, &left.applied);
        self.held.names.remove(&old.index);
        plan.last.push(Op::ClearInfo(old.index));
        for source in self.sources_of(ipv6, old.index) {
            self.remove_source(source, plan);
        }
        self.indices.release(IndexRange { base: old.index, len: 1 }, now);
        for range in [old.cluster, old.local] {
            self.lists.free(ipv6, range, now);
        }
        self.tables.free(old.table, now);
        self.free_former(ipv6, &old.former, now);
    }

    /// Frees the entries of an earlier agent that belonged only to Service ports that no longer
    /// exist.
    pub(super) fn forget_leftovers(&mut self, plan: &mut Plan) {
        let leftover = self.held.sources.iter().filter(|source| !self.owners.contains_key(&source.service));
        for source in leftover.copied().collect::<Vec<_>>() {
            self.remove_source(source, plan);
        }
        let leftover = self.held.names.keys().filter(|index| !self.owners.contains_key(index));
        for index in leftover.copied().collect::<Vec<_>>() {
            self.held.names.remove(&index);
            plan.last.push(Op::ClearInfo(index));
        }
    }

    /// Records that a Service port finds no room: its entries in the maps stay.
    pub(super) fn leave_out(
        &mut self,
        key: &ServicePortKey,
        port: &ServicePort,
        lack: Lack,
        old: Option<Applied>,
        adopted: Option<Place>,
        plan: &mut Plan,
    ) {
        let kept = old.or_else(|| {
            let Place { index, cluster, local, table, former } = adopted?;
            Some(Applied {
                port: Arc::new(self.as_found(key, port, index, [cluster, local])),
                index,
                cluster,
                local,
                table,
                former,
            })
        });
        let Some(kept) = kept else {
            plan.left_out.push(LeftOut::new(key, lack, &[], &port.local));
            return;
        };
        let held = |id| self.held.frontends.get(&id).is_some_and(|held| held.service == kept.index);
        let local = if ids(key, port).all(held) { self.lists.get(key.ipv6, kept.local) } else { &[] };
        plan.left_out.push(LeftOut::new(key, lack, local, &port.local));
        self.record(key, kept);
    }
}

/// A Service port that is no longer desired, with its index and ranges.
pub(super) struct Vacated {
    key: ServicePortKey,
    applied: Applied,
}

/// Returns the index and ranges of a removed Service port for one that takes over one of its
/// frontends, as when a port is renamed: flows and sockets refer to their Service by its index, and
/// continue.
pub(super) fn take_over(
    key: &ServicePortKey,
    port: &ServicePort,
    vacated: &mut Vec<Vacated>,
) -> Option<Place> {
    let place = vacated.iter().position(|left| {
        (left.key.ipv6, left.key.protocol) == (key.ipv6, key.protocol)
            && !left.applied.port.frontends.is_disjoint(&port.frontends)
    })?;
    Some(vacated.swap_remove(place).applied.place())
}
