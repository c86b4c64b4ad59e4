//! Numbers of a plan: what the maps hold after it, and what is asked for beyond their size.

use std::{
    collections::{BTreeSet, HashMap},
    time::Duration,
};

use ipnet::Ipv4Net;
use traffic_policy_cluster::model::{Desired, Protocol, ServiceName, ServicePort, ServicePortKey};

use super::{
    super::{budget::Lack, op::Op},
    Plan, Planner, ids, sources,
};
use crate::dataplane::maps::keys::Source;

/// Entries in use; pairs are IPv4, IPv6.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// With the ClusterIPs beside them.
    pub frontends: [u64; 2],
    pub slots: [u64; 2],
    pub source_ranges: [u64; 2],
    /// Indices of Service ports.
    pub services: u64,
}

/// Entries that a Service asks for, over all of its ports of one family: who splits many addresses into many ports asks for
/// as much.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Demand {
    frontends: usize,
    source_ranges: usize,
}

/// The demand of each Service that a plan is for, by family.
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
    /// As it is after the last plan.
    pub fn usage(&self) -> Usage {
        Usage {
            frontends: self.budget.frontends.used(),
            slots: self.lists.used(),
            source_ranges: self.budget.source_ranges.used(),
            services: self.ports.len() as u64,
        }
    }

    /// Service ports one of whose frontends drains at `monotonic` (CLOCK_MONOTONIC, nanoseconds), and for how long yet.
    pub fn draining(&self, monotonic: u64) -> Vec<(ServicePortKey, Duration)> {
        // Most of the time nothing drains, and one look at each frontend is enough.
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

    /// The lack of a Service port that asks for more than is free, but for endpoints and an index. `index`: as it has it already.
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

    pub(super) fn forget_cluster_ips(&mut self, desired: &Desired, plan: &mut Plan) {
        let Self { held, budget, .. } = self;
        held.cluster_ips.retain(|address| {
            let known = desired.cluster_ips.contains_key(address);
            if !known {
                budget.frontends.remove(address.is_ipv6());
                plan.ops.push(Op::ClusterIp(*address, false));
            }
            known
        });
    }

    /// Says which addresses are ClusterIPs. One that finds no room is left out until the next plan: its other ports are
    /// dropped then, instead of rejected.
    pub(super) fn name_cluster_ips(&mut self, desired: &Desired, plan: &mut Plan) {
        let mut whole = true;
        for address in desired.cluster_ips.keys().filter(|address| !self.held.cluster_ips.contains(address)) {
            if !self.budget.frontends.fits(address.is_ipv6(), 1, 1) {
                whole = false;
                continue;
            }
            plan.last.push(Op::ClusterIp(*address, true));
            self.budget.frontends.add(address.is_ipv6());
        }
        self.held.cluster_ips.extend(plan.last.iter().filter_map(|op| match op {
            Op::ClusterIp(address, true) => Some(*address),
            _ => None,
        }));
        self.cluster_ips = whole.then(|| std::sync::Arc::clone(&desired.cluster_ips));
    }
}
