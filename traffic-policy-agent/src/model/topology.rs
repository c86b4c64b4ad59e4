//! Endpoints that may take new connections, by readiness and topology hints: kube-proxy's two lists for each Service port.

use std::{
    collections::{BTreeMap, BTreeSet, btree_map::Entry},
    net::SocketAddr,
};

use super::{Endpoint, object::SliceEndpoint};

/// Where this node stands, for the topology hints.
#[derive(Clone, Copy, Debug)]
pub(super) struct NodeTopology<'a> {
    pub(super) node_name: &'a str,
    pub(super) zone: Option<&'a str>,
}

/// The endpoints of one Service port and family, from all slices, one for each address and port.
#[derive(Debug, Default)]
pub(super) struct Candidates<'a>(BTreeMap<SocketAddr, (&'a SliceEndpoint, bool)>);

impl<'a> Candidates<'a> {
    /// Endpoints move between slices, and for a moment stand in both: of two the local one counts, else the first.
    pub(super) fn add(
        &mut self,
        address: SocketAddr,
        endpoint: &'a SliceEndpoint,
        topology: NodeTopology<'_>,
    ) {
        let local = endpoint.node_name.as_deref() == Some(topology.node_name);
        match self.0.entry(address) {
            Entry::Vacant(entry) => {
                entry.insert((endpoint, local));
            }
            Entry::Occupied(mut entry) => {
                if local && !entry.get().1 {
                    entry.insert((endpoint, local));
                }
            }
        }
    }

    /// For policy Cluster: ready endpoints, narrowed by topology; if there is none, terminating ones that still serve.
    pub(super) fn cluster(&self, topology: NodeTopology<'_>) -> Vec<Endpoint> {
        let mut ready: Vec<_> = self
            .0
            .iter()
            .filter(|(_, (endpoint, _))| endpoint.ready)
            .map(|(a, (e, l))| (*a, *e, *l))
            .collect();
        if ready.is_empty() {
            return sorted(
                self.draining().map(|(address, endpoint, local)| chosen(address, endpoint, local)),
            );
        }
        narrow(&mut ready, topology);
        sorted(ready.into_iter().map(|(address, endpoint, local)| chosen(address, endpoint, local)))
    }

    /// For policy Local: the same of this node's endpoints, without topology.
    pub(super) fn local(&self) -> Vec<Endpoint> {
        let ready = sorted(
            self.0
                .iter()
                .filter(|(_, (endpoint, local))| *local && endpoint.ready)
                .map(|(&address, (endpoint, _))| chosen(address, endpoint, true)),
        );
        if !ready.is_empty() {
            return ready;
        }
        sorted(
            self.draining()
                .filter(|(_, _, local)| *local)
                .map(|(address, endpoint, local)| chosen(address, endpoint, local)),
        )
    }

    pub(super) fn any_usable(&self) -> bool {
        self.0.values().any(|(endpoint, _)| endpoint.ready) || self.draining().next().is_some()
    }

    /// A ready endpoint counts even if it says that it does not serve (`publishNotReadyAddresses`): it gets new
    /// flows, so it must be allowed to keep them.
    pub(super) fn serving(&self) -> BTreeSet<SocketAddr> {
        self.0
            .iter()
            .filter(|(_, (endpoint, _))| endpoint.serving || endpoint.ready)
            .map(|(&address, _)| address)
            .collect()
    }

    pub(super) fn ready_local(&self) -> impl Iterator<Item = SocketAddr> + '_ {
        self.0.iter().filter(|(_, (endpoint, local))| *local && endpoint.ready).map(|(&address, _)| address)
    }

    fn draining(&self) -> impl Iterator<Item = (SocketAddr, &SliceEndpoint, bool)> + '_ {
        self.0
            .iter()
            .filter(|(_, (endpoint, _))| endpoint.serving && endpoint.terminating)
            .map(|(&address, &(endpoint, local))| (address, endpoint, local))
    }
}

/// An endpoint for a list.
fn chosen(address: SocketAddr, endpoint: &SliceEndpoint, local: bool) -> Endpoint {
    Endpoint { address, local, remote: !local && endpoint.node_name.is_some() }
}

/// Same node first, then same zone. One endpoint without a hint of a kind turns that kind off, and so does a hint set
/// that never names this node or zone: rather all endpoints than none.
fn narrow(ready: &mut Vec<(SocketAddr, &SliceEndpoint, bool)>, topology: NodeTopology<'_>) {
    let for_node =
        |endpoint: &SliceEndpoint| endpoint.for_nodes.iter().any(|node| **node == *topology.node_name);
    let for_zone =
        |endpoint: &SliceEndpoint| endpoint.for_zones.iter().any(|zone| Some(&**zone) == topology.zone);
    if ready.iter().all(|(_, e, _)| !e.for_nodes.is_empty()) && ready.iter().any(|(_, e, _)| for_node(e)) {
        ready.retain(|(_, endpoint, _)| for_node(endpoint));
    } else if ready.iter().all(|(_, e, _)| !e.for_zones.is_empty())
        && ready.iter().any(|(_, e, _)| for_zone(e))
    {
        ready.retain(|(_, endpoint, _)| for_zone(endpoint));
    }
}

/// In the order of `address:port` as text, as kube-proxy has it, so that equal sets are equal lists.
fn sorted(endpoints: impl Iterator<Item = Endpoint>) -> Vec<Endpoint> {
    let mut endpoints: Vec<_> = endpoints.collect();
    endpoints.sort_by_cached_key(|endpoint| endpoint.address.to_string());
    endpoints
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const TOPOLOGY: NodeTopology<'_> = NodeTopology { node_name: "here", zone: Some("zone-a") };

    fn endpoint() -> impl Strategy<Value = (SocketAddr, SliceEndpoint)> {
        let node = prop_oneof![Just(None), Just(Some("here")), Just(Some("there"))];
        let hint = |here| prop_oneof![Just(None), Just(Some(here)), Just(Some("elsewhere"))];
        (0u8..6, node, any::<[bool; 3]>(), hint("here"), hint("zone-a")).prop_map(
            |(last, node, [ready, serving, terminating], for_node, for_zone)| {
                let address = SocketAddr::from(([10, 0, 0, last], 80));
                (
                    address,
                    SliceEndpoint {
                        address: address.ip(),
                        node_name: node.map(Into::into),
                        ready,
                        serving,
                        terminating,
                        for_zones: for_zone.map(Into::into).into_iter().collect(),
                        for_nodes: for_node.map(Into::into).into_iter().collect(),
                    },
                )
            },
        )
    }

    proptest! {
        #[test]
        fn lists_hold_what_they_promise(endpoints in prop::collection::vec(endpoint(), 0..12)) {
            let mut candidates = Candidates::default();
            for (address, endpoint) in &endpoints {
                candidates.add(*address, endpoint, TOPOLOGY);
            }
            let (cluster, local) = (candidates.cluster(TOPOLOGY), candidates.local());
            // A list is empty only if nothing at all could be in it.
            prop_assert_eq!(cluster.is_empty(), !candidates.any_usable());
            prop_assert!(local.iter().all(|endpoint| endpoint.local));
            prop_assert!(local.is_empty() || candidates.any_usable());
            // New flows go only to endpoints that may keep them.
            let serving = candidates.serving();
            prop_assert!(cluster.iter().chain(&local).all(|endpoint| serving.contains(&endpoint.address)));
            // Terminating endpoints never stand beside ready ones.
            let ready = |e: &Endpoint| candidates.0[&e.address].0.ready;
            for list in [&cluster, &local] {
                prop_assert!(list.iter().all(ready) || !list.iter().any(ready));
            }
            let distinct: BTreeSet<_> = cluster.iter().map(|endpoint| endpoint.address).collect();
            prop_assert_eq!(distinct.len(), cluster.len());
        }

        #[test]
        fn a_second_slice_with_the_same_endpoints_changes_nothing(
            endpoints in prop::collection::btree_map(0u8..6, endpoint(), 0..6)
        ) {
            let endpoints: BTreeMap<_, _> = endpoints.into_values().collect();
            let mut once = Candidates::default();
            let mut twice = Candidates::default();
            for (address, endpoint) in &endpoints {
                once.add(*address, endpoint, TOPOLOGY);
                twice.add(*address, endpoint, TOPOLOGY);
            }
            for (address, endpoint) in endpoints.iter().rev() {
                twice.add(*address, endpoint, TOPOLOGY);
            }
            prop_assert_eq!(once.cluster(TOPOLOGY), twice.cluster(TOPOLOGY));
            prop_assert_eq!(once.local(), twice.local());
        }
    }
}
