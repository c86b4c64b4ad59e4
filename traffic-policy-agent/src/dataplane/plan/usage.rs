//! What the plan has used up, and which Service ports drain.

use std::time::Duration;

use super::{Planner, ids};
use crate::model::ServicePortKey;

/// Entries in use; pairs are IPv4, IPv6.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    pub frontends: [u64; 2],
    pub slots: [u64; 2],
    pub source_ranges: [u64; 2],
    /// Indices of Service ports.
    pub services: u64,
}

impl Planner {
    /// As it is after the last plan.
    pub fn usage(&self) -> Usage {
        let mut usage = Usage { services: self.ports.len() as u64, ..Usage::default() };
        for id in self.held.frontends.keys() {
            usage.frontends[usize::from(id.address.is_ipv6())] += 1;
        }
        for ((ipv6, _), endpoints) in &self.held.slots {
            usage.slots[usize::from(*ipv6)] += endpoints.len() as u64;
        }
        for source in &self.held.sources {
            usage.source_ranges[usize::from(source.ipv6)] += 1;
        }
        usage
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

    /// Whether the next plan compares everything with what the maps hold.
    pub fn is_first(&self) -> bool {
        self.first
    }
}
