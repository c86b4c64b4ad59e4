//! Services of another proxy in an [`Index`]: their addresses are neither available to other
//! Services nor unallocated.

use std::{collections::BTreeSet, net::IpAddr};

use super::{Changes, Index};
use crate::model::{NodeInput, ServiceName};

impl Index {
    /// Updates the desired ranges of ClusterIPs.
    pub(super) fn update_service_cidrs(&mut self, input: &NodeInput, changes: &mut Changes) {
        let mut ranges = BTreeSet::new();
        if !self.blind {
            ranges.clone_from(&input.service_cidrs);
            ranges.extend(self.service_cidrs.values().flat_map(|object| &object.cidrs));
        }
        if self.asked_cidrs.as_ref() == Some(&ranges) {
            return;
        }
        self.asked_cidrs = Some(ranges.clone());
        let ranges = self.foreign.taken_from(&ranges);
        if self.desired.service_cidrs != ranges {
            self.desired.service_cidrs = ranges;
            changes.service_cidrs = true;
        }
    }

    /// Records that a Service of another proxy has other addresses now.
    pub(super) fn replace_foreign(&mut self, name: &ServiceName, old: &[IpAddr], new: &[IpAddr]) {
        if old == new {
            return;
        }
        self.foreign.remove(name, old);
        self.foreign.add(name, new);
        self.foreign_changed.extend(old.iter().chain(new));
        self.asked_cidrs = None;
    }

    /// Adds the Services that name an address which another proxy has gained or lost: they lose or
    /// gain it.
    pub(super) fn touch_foreign(&mut self, settle: &mut BTreeSet<ServiceName>) {
        let changed = std::mem::take(&mut self.foreign_changed);
        if changed.is_empty() {
            return;
        }
        #[cfg(test)]
        {
            self.looked_at += self.services.len();
        }
        let concerned = self.services.values().filter(|service| {
            let mut addresses = service.external_ips.iter().chain(&service.load_balancer_ips);
            addresses.any(|address| changed.contains(address))
        });
        settle.extend(concerned.map(|service| service.name.clone()));
    }
}
