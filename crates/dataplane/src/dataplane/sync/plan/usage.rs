//! The figures of a plan: the content of the maps after it, and the demand beyond their size.

use std::{
    collections::{BTreeSet, HashMap},
    net::IpAddr,
    time::Duration,
};

use ipnet::Ipv4Net;
use traffic_policy_cluster::model::{Changes, Desired, Protocol, ServiceName, ServicePort, ServicePortKey};

use super::{
    super::{budget::Lack, op::Op},
    Plan, Planner, ids, sources,
};
use crate::dataplane::maps::keys::Source;

/// The entries in use; pairs are IPv4, IPv6.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// The frontends, including the ClusterIPs in addition to them.
    pub frontends: [u64; 2],
    pub slots: [u64; 2],
    pub source_ranges: [u64; 2],
    /// The indices of Service ports.
    pub services: u64,
    /// The elements of Maglev tables.
    pub tables: u64,
}

/// The entries that a Service needs, over all of its ports of one family: splitting many addresses
/// over many ports does not reduce them.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Demand {
    frontends: usize,
    source_ranges: usize,
}

/// The demand of each Service that a plan processes, by family.
#[derive(Debug, Default)]
pub(super) struct Demands<'a>(HashMap<(&'a ServiceName, bool), Demand>);

impl<'a> Demands<'a> {
    pub(super) fn of(desired: &'a Desired, keys: &[&'a ServicePortKey]) -> Self {
        let mut demands = HashMap::new();
        for key in keys {
            demands.entry((&key.service, key.ipv6)).or_insert_with(|| Demand::of(desired, key));
        }
        Self(demands)
    }

    fn get(&self, key: &ServicePortKey) -> Demand {
        self.0.get(&(&key.service, key.ipv6)).copied().unwrap_or_default()
    }
}

impl Demand {
    fn of(desired: &Desired, key: &ServicePortKey) -> Self {
        let service = key.service.clone();
        let first = ServicePortKey { service, port: String::new(), protocol: Protocol::Tcp, ipv6: false };
        let ports = desired.ports.range(first..).take_while(|(other, _)| other.service == key.service);
        let mut demand = Self::default();
        for (_, port) in ports.filter(|(other, _)| other.ipv6 == key.ipv6) {
            demand.frontends += port.frontends.len();
            demand.source_ranges += port.source_ranges.len();
        }
        demand
    }
}

impl Planner {
    /// Returns the usage after the last plan.
    pub fn usage(&self) -> Usage {
        Usage {
            frontends: self.budget.frontends.used(),
            slots: self.lists.used(),
            source_ranges: self.budget.source_ranges.used(),
            services: self.ports.len() as u64,
            tables: self.tables.used(),
        }
    }

    /// Returns the Service ports with a frontend that drains at `monotonic` (CLOCK_MONOTONIC,
    /// nanoseconds), and the remaining time of each.
    pub fn draining(&self, monotonic: u64) -> Vec<(ServicePortKey, Duration)> {
        // Most of the time nothing drains, and one check of each frontend is enough.
        if self.held.frontends.values().all(|frontend| frontend.drain_until <= monotonic) {
            return Vec::new();
        }
        let left = |key: &ServicePortKey, port| {
            let held = ids(key, port).filter_map(|id| self.held.frontends.get(&id));
            held.filter_map(|frontend| frontend.drain_until.checked_sub(monotonic))
                .max()
                .filter(|left| *left > 0)
        };
        let ports = self.ports.iter();
        ports
            .filter_map(|(key, applied)| Some((key.clone(), Duration::from_nanos(left(key, &applied.port)?))))
            .collect()
    }

    pub(super) fn sources_of(&self, ipv6: bool, service: u32) -> Vec<Source> {
        // IPv4 networks sort before IPv6 ones.
        let first = Source { ipv6, service, range: Ipv4Net::default().into() };
        let from = self.held.sources.range(first..);
        from.take_while(|source| (source.ipv6, source.service) == (ipv6, service)).copied().collect()
    }

    pub(super) fn remove_source(&mut self, source: Source, plan: &mut Plan) {
        if self.held.sources.remove(&source) {
            plan.last.push(Op::RemoveSourceRange(source));
        }
    }

    /// Returns the lack of a Service port that needs more than is free, other than endpoints and an
    /// index. `index`: its current index, if it has one.
    pub(super) fn lack(
        &self,
        key: &ServicePortKey,
        port: &ServicePort,
        index: Option<u32>,
        demands: &Demands<'_>,
    ) -> Option<Lack> {
        let (ipv6, all) = (key.ipv6, demands.get(key));
        let needed = ids(key, port).filter(|id| !self.held.frontends.contains_key(id)).count();
        if !self.budget.frontends.fits(ipv6, needed, all.frontends) {
            return Some(Lack::Frontends { needed, free: self.budget.frontends.free(ipv6, all.frontends) });
        }
        let wanted: BTreeSet<_> = sources(key, port, index.unwrap_or(u32::MAX));
        let needed = wanted.difference(&self.held.sources).count();
        if !self.budget.source_ranges.fits(ipv6, needed, all.source_ranges) {
            let free = self.budget.source_ranges.free(ipv6, all.source_ranges);
            return Some(Lack::SourceRanges { needed, free });
        }
        None
    }

    /// Returns the ClusterIPs that may have been added or removed: all of them, the first time.
    pub(super) fn concerned_cluster_ips(&self, desired: &Desired, changes: &Changes) -> BTreeSet<IpAddr> {
        if self.first {
            self.held.cluster_ips.iter().chain(desired.cluster_ips.keys()).copied().collect()
        } else {
            changes.cluster_ips.clone()
        }
    }

    /// Removes those of `concerned` that are no longer ClusterIPs.
    pub(super) fn forget_cluster_ips(
        &mut self,
        concerned: &BTreeSet<IpAddr>,
        desired: &Desired,
        plan: &mut Plan,
    ) {
        for address in concerned {
            self.note_look();
            if desired.cluster_ips.contains_key(address) {
                continue;
            }
            self.unnamed.remove(address);
            if self.held.cluster_ips.remove(address) {
                self.budget.frontends.remove(address.is_ipv6());
                plan.ops.push(Op::ClusterIp(*address, false));
            }
        }
    }

    /// Writes those of `concerned` that are ClusterIPs. One that finds no room is left out until a
    /// plan has some: until then its other ports are dropped instead of rejected.
    pub(super) fn name_cluster_ips(
        &mut self,
        concerned: &BTreeSet<IpAddr>,
        desired: &Desired,
        plan: &mut Plan,
    ) {
        for address in concerned {
            self.note_look();
            if desired.cluster_ips.contains_key(address) && !self.held.cluster_ips.contains(address) {
                self.unnamed.insert(*address);
            }
        }
        for ipv6 in [false, true] {
            while self.budget.frontends.fits(ipv6, 1, 1) {
                // IPv4 addresses sort before IPv6 ones.
                let next = if ipv6 { self.unnamed.last() } else { self.unnamed.first() };
                let Some(address) = next.copied().filter(|address| address.is_ipv6() == ipv6) else { break };
                self.note_look();
                self.unnamed.remove(&address);
                plan.last.push(Op::ClusterIp(address, true));
                self.budget.frontends.add(ipv6);
                self.held.cluster_ips.insert(address);
            }
        }
    }

    /// Counts a ClusterIP that a plan examines, in tests.
    fn note_look(&mut self) {
        #[cfg(test)]
        {
            self.looked_at += 1;
        }
    }
}
