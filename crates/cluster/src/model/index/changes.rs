//! Changes of the desired state, by which the maps are written.

use std::{collections::BTreeSet, net::IpAddr};

use crate::model::{ServiceName, ServicePortKey, Warning};

/// Changes of the desired state in one call of [`Index::update`][super::Index::update].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Changes {
    /// Service ports that were added, changed or removed.
    pub ports: BTreeSet<ServicePortKey>,
    /// Cluster IPs that were added or removed, or removed and added again.
    pub cluster_ips: BTreeSet<IpAddr>,
    /// Whether the set of Services that ask for more than the maps can hold changed.
    pub refused: bool,
    /// Services whose health check was added, changed or removed.
    pub health: BTreeSet<ServiceName>,
    pub node_eligible: bool,
    pub service_cidrs: bool,
    /// Whether the set of nodes that may forward to this one directly changed.
    pub direct_nodes: bool,
    pub warnings: bool,
    /// Warnings that were added.
    pub warned: BTreeSet<Warning>,
}

impl Changes {
    /// Whether nothing changed.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Adds earlier changes that were not written to the maps. Their warnings have been reported.
    pub fn add_unwritten(&mut self, earlier: Self) {
        self.ports.extend(earlier.ports);
        self.cluster_ips.extend(earlier.cluster_ips);
        self.health.extend(earlier.health);
        self.refused |= earlier.refused;
        self.direct_nodes |= earlier.direct_nodes;
    }
}
