//! Where lists of endpoints and indices lie: kept, taken anew, taken over from an earlier agent or from a Service port that goes, given back.

use std::time::Instant;

use traffic_policy_ebpf::abi::{Frontend, Range};

use super::{Applied, FrontendId, Op, Plan, Planner, ids};
use crate::model::{Endpoint, ServicePort, ServicePortKey};

impl Planner {
    /// The range that holds `endpoints`: the old one if it does, else a fresh one.
    pub(super) fn list(
        &mut self,
        ipv6: bool,
        old: Range,
        endpoints: &[Endpoint],
        now: Instant,
        plan: &mut Plan,
    ) -> Option<Range> {
        if old.len as usize == endpoints.len()
            && (endpoints.is_empty()
                || self.held.slots.get(&(ipv6, old.base)).is_some_and(|held| held == endpoints))
        {
            return Some(old);
        }
        let range = self.ranges[usize::from(ipv6)].take(u32::try_from(endpoints.len()).ok()?, now)?;
        if range.len > 0 {
            plan.ops.push(Op::Slots { ipv6, base: range.base, endpoints: endpoints.to_vec() });
            self.held.slots.insert((ipv6, range.base), endpoints.to_vec());
        }
        Some(range)
    }

    /// Index and ranges of an earlier agent for this Service port, by its frontends.
    pub(super) fn adopt(&self, key: &ServicePortKey, port: &ServicePort) -> Option<(u32, Range, Range)> {
        if !self.first {
            return None;
        }
        ids(key, port)
            .filter_map(|id| self.held.frontends.get(&id))
            .find(|frontend| !self.owners.contains_key(&frontend.service))
            .map(|frontend| (frontend.service, frontend.cluster, frontend.local))
    }

    /// A Service port as an earlier agent left it: what of its frontends and endpoints the maps hold.
    pub(super) fn as_found(
        &self,
        key: &ServicePortKey,
        port: &ServicePort,
        index: u32,
        lists: [Range; 2],
    ) -> ServicePort {
        let held = |id: FrontendId| self.held.frontends.get(&id).is_some_and(|held| held.service == index);
        let frontends = port
            .frontends
            .iter()
            .filter(|frontend| held(FrontendId { address: frontend.address, protocol: key.protocol }));
        let endpoints = lists.iter().filter(|list| list.len > 0);
        let endpoints = endpoints.filter_map(|list| self.held.slots.get(&(key.ipv6, list.base))).flatten();
        ServicePort {
            frontends: frontends.copied().collect(),
            serving: endpoints.map(|endpoint| endpoint.address).collect(),
            ..port.clone()
        }
    }

    /// Frees what the last frontend of an earlier agent's Service port used, unless it was adopted.
    pub(super) fn release_found(&mut self, id: FrontendId, frontend: &Frontend, now: Instant) {
        let ipv6 = id.address.is_ipv6();
        if self.owners.contains_key(&frontend.service) {
            return;
        }
        self.indices.release(Range { base: frontend.service, len: 1 }, now);
        for range in [frontend.cluster, frontend.local] {
            if self.held.slots.contains_key(&(ipv6, range.base)) {
                self.free(ipv6, range, now);
            }
        }
    }

    /// Takes a Service port off; what it had may be taken over in the same plan.
    pub(super) fn withdraw(&mut self, key: &ServicePortKey) -> Option<Vacated> {
        let applied = self.ports.remove(key)?;
        self.owners.remove(&applied.index);
        Some(Vacated { key: key.clone(), applied })
    }

    /// Gives back what nobody took over.
    pub(super) fn vacate(&mut self, left: &Vacated, now: Instant, plan: &mut Plan) {
        let (ipv6, old) = (left.key.ipv6, &left.applied);
        self.held.names.remove(&old.index);
        plan.last.push(Op::Unname(old.index));
        for source in self.sources_of(ipv6, old.index) {
            self.held.sources.remove(&source);
            plan.last.push(Op::Forbid(source));
        }
        self.indices.release(Range { base: old.index, len: 1 }, now);
        for range in [old.cluster, old.local] {
            self.free(ipv6, range, now);
        }
    }

    /// Gives a range back. An empty one has no place: the base that it names is another's.
    pub(super) fn free(&mut self, ipv6: bool, range: Range, now: Instant) {
        if range.len > 0 {
            self.held.slots.remove(&(ipv6, range.base));
            self.ranges[usize::from(ipv6)].release(range, now);
        }
    }
}

/// A Service port that is desired no more, with what it had.
pub(super) struct Vacated {
    key: ServicePortKey,
    applied: Applied,
}

/// Index and ranges of a Service port that goes, for one that takes over a frontend of it, as when a port is renamed: flows
/// and sockets know their Service by its index, and go on.
pub(super) fn take_over(
    key: &ServicePortKey,
    port: &ServicePort,
    vacated: &mut Vec<Vacated>,
) -> Option<(u32, Range, Range)> {
    let place = vacated.iter().position(|left| {
        (left.key.ipv6, left.key.protocol) == (key.ipv6, key.protocol)
            && !left.applied.port.frontends.is_disjoint(&port.frontends)
    })?;
    let Applied { index, cluster, local, .. } = vacated.swap_remove(place).applied;
    Some((index, cluster, local))
}
