//! Endpoints that may take new connections, by readiness and topology hints: kube-proxy's two lists
//! for each Service port.

use std::{
    collections::{BTreeMap, BTreeSet, btree_map::Entry},
    net::{IpAddr, SocketAddr},
};

use super::{
    Endpoint, Forwarding, Protocol, Weights, direct_nodes::DirectNodes, node_numbers::NodeNumbers,
    object::SliceEndpoint,
};

/// The location of this node, for the topology hints.
#[derive(Clone, Copy, Debug)]
pub(super) struct NodeTopology<'a> {
    pub(super) node_name: &'a str,
    pub(super) zone: Option<&'a str>,
}

/// Those whose endpoints take no new flows, although Kubernetes counts them as ready.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Silent {
    pub nodes: BTreeSet<String>,
    /// The addresses of endpoints without a `nodeName`, whose next hop is silent.
    pub addresses: BTreeSet<IpAddr>,
}

impl Silent {
    pub(super) fn has(&self, endpoint: &SliceEndpoint) -> bool {
        match &endpoint.node_name {
            Some(node) => self.nodes.contains(&**node),
            None => self.addresses.contains(&endpoint.address),
        }
    }
}

impl From<BTreeSet<String>> for Silent {
    fn from(nodes: BTreeSet<String>) -> Self {
        Self { nodes, addresses: BTreeSet::new() }
    }
}

/// The endpoints of one Service port and family, from all slices, one for each address and port.
#[derive(Debug, Default)]
pub(super) struct Candidates<'a> {
    all: BTreeMap<SocketAddr, (&'a SliceEndpoint, bool)>,
    /// The endpoints that no new flow may choose: silent ones, and those of nodes about to go.
    left_out: BTreeSet<SocketAddr>,
    /// The silent ones of them.
    silent: BTreeSet<SocketAddr>,
}

impl<'a> Candidates<'a> {
    /// Adds endpoints of a slice. Endpoints move between slices and are briefly in both: of two
    /// entries, the local one counts, otherwise the first.
    pub(super) fn add(
        &mut self,
        address: SocketAddr,
        endpoint: &'a SliceEndpoint,
        topology: NodeTopology<'_>,
    ) {
        let local = endpoint.node_name.as_deref() == Some(topology.node_name);
        match self.all.entry(address) {
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

    /// Leaves out the silent endpoints and those of nodes that are about to go, after all were
    /// added: never those of this node. If no usable endpoint would remain, the silent ones alone
    /// are left out, or else none. Returns whether any was left out.
    pub(super) fn leave_out(&mut self, silent: &Silent, leaving: &BTreeSet<String>) -> bool {
        if let Some(left_out) = self.of(|endpoint| silent.has(endpoint)) {
            self.silent.clone_from(&left_out);
            self.left_out = left_out;
        }
        let leaves = |endpoint: &SliceEndpoint| {
            endpoint.node_name.as_deref().is_some_and(|node| leaving.contains(node))
        };
        if let Some(left_out) = self.of(|endpoint| silent.has(endpoint) || leaves(endpoint)) {
            self.left_out = left_out;
        }
        !self.left_out.is_empty()
    }

    /// Returns the endpoints of a kind, without those of this node; `None` if no usable one is of
    /// another kind.
    fn of(&self, is_one: impl Fn(&SliceEndpoint) -> bool) -> Option<BTreeSet<SocketAddr>> {
        let (there, others): (Vec<_>, Vec<_>) =
            self.all.iter().partition(|(_, (endpoint, local))| !local && is_one(endpoint));
        let remain = others.iter().any(|(_, (endpoint, _))| is_usable(endpoint));
        remain.then(|| there.into_iter().map(|(address, _)| *address).collect())
    }

    /// Returns the list for policy Cluster: the [`eligible`] endpoints, without those that are left
    /// out; ready ones are narrowed by topology.
    pub(super) fn cluster(
        &self,
        topology: NodeTopology<'_>,
        numbers: &NodeNumbers,
        direct: &DirectNodes,
        way: (Forwarding, Protocol),
        weights: &Weights,
    ) -> Vec<Endpoint> {
        let remaining = self.all().filter(|(address, ..)| !self.left_out.contains(address));
        let (mut list, ready) = eligible(remaining, |(_, endpoint, _)| *endpoint);
        // Whether every node makes the same list: each finds for itself which nodes are silent.
        let mut alike = self.silent.is_empty();
        if ready {
            let hints = Hints::of(list.iter().map(|(_, endpoint, _)| *endpoint));
            alike &= hints.nodes.is_none() && hints.zones.is_none();
            let scope = hints.scope(topology);
            list.retain(|(_, endpoint, _)| scope.has(endpoint));
        }
        let nodes: Vec<_> = list.iter().map(|(_, endpoint, _)| endpoint.node_name.as_deref()).collect();
        let weights = weights.of(&nodes);
        sorted(list.into_iter().zip(weights).map(|((address, endpoint, local), weight)| {
            let number =
                if local { None } else { endpoint.node_name.as_deref().map(|name| numbers.get(name)) };
            let node_name = endpoint.node_name.as_deref().filter(|_| !local);
            let opens = direct.open(address.ip(), node_name, way);
            let opens = if alike { opens } else { opens.within() };
            Endpoint {
                opens: opens.all,
                held: opens.held,
                node: number.unwrap_or(0),
                weight,
                ..chosen(address, endpoint, local)
            }
        }))
    }

    /// Returns the list for policy Local: the [`eligible`] endpoints of this node, not narrowed by
    /// topology.
    pub(super) fn local(&self) -> Vec<Endpoint> {
        let (list, _) = eligible(self.all().filter(|(_, _, local)| *local), |(_, endpoint, _)| *endpoint);
        sorted(list.into_iter().map(|(address, endpoint, local)| chosen(address, endpoint, local)))
    }

    pub(super) fn any_usable(&self) -> bool {
        self.all.values().any(|(endpoint, _)| is_usable(endpoint))
    }

    fn all(&self) -> impl Iterator<Item = (SocketAddr, &'a SliceEndpoint, bool)> + Clone + '_ {
        self.all.iter().map(|(&address, &(endpoint, local))| (address, endpoint, local))
    }

    /// Returns the endpoints that may keep flows. A ready endpoint counts even if it reports that
    /// it does not serve (`publishNotReadyAddresses`): it gets new flows, so it must be allowed to
    /// keep them.
    ///
    /// A silent UDP endpoint loses its flows, as one that vanishes does: a datagram of
    /// theirs is as good as a new flow's. Those of TCP and SCTP stay: what they have sent is with
    /// that endpoint alone, and it may come back.
    pub(super) fn serving(&self, protocol: Protocol) -> BTreeSet<SocketAddr> {
        let keeps = |address: &SocketAddr| protocol != Protocol::Udp || !self.silent.contains(address);
        self.all
            .iter()
            .filter(|(_, (endpoint, _))| endpoint.serving || endpoint.ready)
            .map(|(&address, _)| address)
            .filter(keeps)
            .collect()
    }

    /// Returns the endpoints on this node, in any condition.
    pub(super) fn here(&self) -> BTreeSet<SocketAddr> {
        self.all.iter().filter(|(_, (_, local))| *local).map(|(&address, _)| address).collect()
    }

    pub(super) fn ready_local(&self) -> impl Iterator<Item = SocketAddr> + '_ {
        self.all.iter().filter(|(_, (endpoint, local))| *local && endpoint.ready).map(|(&address, _)| address)
    }
}

/// Returns the ready endpoints or, if there are none, terminating ones that still serve, and
/// whether they are ready.
pub(super) fn eligible<'a, T>(
    endpoints: impl Iterator<Item = T> + Clone,
    of: impl Fn(&T) -> &'a SliceEndpoint,
) -> (Vec<T>, bool) {
    let ready: Vec<T> = endpoints.clone().filter(|endpoint| of(endpoint).ready).collect();
    if !ready.is_empty() {
        return (ready, true);
    }
    (endpoints.filter(|endpoint| drains(of(endpoint))).collect(), false)
}

/// Whether an endpoint can take new flows: at once, or while there is no ready one.
pub(super) fn is_usable(endpoint: &SliceEndpoint) -> bool {
    endpoint.ready || drains(endpoint)
}

fn drains(endpoint: &SliceEndpoint) -> bool {
    endpoint.serving && endpoint.terminating
}

/// An endpoint for a list.
fn chosen(address: SocketAddr, endpoint: &SliceEndpoint, local: bool) -> Endpoint {
    let remote = !local && endpoint.node_name.is_some();
    Endpoint { remote, ..Endpoint::new(address, local) }
}

/// The topology hints of ready endpoints, where they apply: one endpoint without a hint of a kind
/// disables that kind.
#[derive(Debug, Default)]
pub(super) struct Hints<'a> {
    /// The nodes that hints name.
    pub(super) nodes: Option<BTreeSet<&'a str>>,
    /// The zones that hints name.
    pub(super) zones: Option<BTreeSet<&'a str>>,
}

impl<'a> Hints<'a> {
    pub(super) fn of(ready: impl Iterator<Item = &'a SliceEndpoint> + Clone) -> Self {
        let nodes = ready.clone().all(|endpoint| !endpoint.for_nodes.is_empty());
        let zones = ready.clone().all(|endpoint| !endpoint.for_zones.is_empty());
        Self {
            nodes: nodes
                .then(|| ready.clone().flat_map(|endpoint| &endpoint.for_nodes).map(AsRef::as_ref).collect()),
            zones: zones.then(|| ready.flat_map(|endpoint| &endpoint.for_zones).map(AsRef::as_ref).collect()),
        }
    }

    /// Chooses the same node first, then the same zone. Hints that never name this node or zone are
    /// ignored: all endpoints are better than none.
    pub(super) fn scope<'t>(&self, topology: NodeTopology<'t>) -> Scope<'t> {
        let named =
            |set: &Option<BTreeSet<&str>>, name: &str| set.as_ref().is_some_and(|set| set.contains(name));
        match topology.zone {
            _ if named(&self.nodes, topology.node_name) => Scope::Node(topology.node_name),
            Some(zone) if named(&self.zones, zone) => Scope::Zone(zone),
            _ => Scope::All,
        }
    }
}

/// The subset of ready endpoints that a node uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Scope<'a> {
    All,
    /// Endpoints with a hint for this zone.
    Zone(&'a str),
    /// Endpoints with a hint for this node.
    Node(&'a str),
}

impl Scope<'_> {
    pub(super) fn has(self, endpoint: &SliceEndpoint) -> bool {
        match self {
            Self::All => true,
            Self::Zone(name) => endpoint.for_zones.iter().any(|zone| **zone == *name),
            Self::Node(name) => endpoint.for_nodes.iter().any(|node| **node == *name),
        }
    }
}

/// Sorts endpoints by `address:port` as text, as kube-proxy does, so that equal sets become equal
/// lists.
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

    fn cluster(candidates: &Candidates<'_>) -> Vec<Endpoint> {
        candidates.cluster(
            TOPOLOGY,
            &NodeNumbers::default(),
            &DirectNodes::default(),
            (Forwarding::Snat, Protocol::Tcp),
            &Weights::default(),
        )
    }

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
                        pod: None,
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
            let (cluster, local) = (cluster(&candidates), candidates.local());
            // A list is empty only if no endpoint could be in it.
            prop_assert_eq!(cluster.is_empty(), !candidates.any_usable());
            prop_assert!(local.iter().all(|endpoint| endpoint.local));
            prop_assert!(local.is_empty() || candidates.any_usable());
            // New flows go only to endpoints that may keep them.
            let serving = candidates.serving(Protocol::Tcp);
            prop_assert!(cluster.iter().chain(&local).all(|endpoint| serving.contains(&endpoint.address)));
            // Terminating endpoints are never listed together with ready ones.
            let ready = |e: &Endpoint| candidates.all[&e.address].0.ready;
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
            prop_assert_eq!(cluster(&once), cluster(&twice));
            prop_assert_eq!(once.local(), twice.local());
        }

        /// The reference is the list of the same endpoints without those of the silent node.
        #[test]
        fn endpoints_of_a_silent_node_are_as_good_as_gone_unless_they_are_the_last(
            endpoints in prop::collection::btree_map(0u8..8, endpoint(), 0..12),
            silent in prop::sample::subsequence(vec!["here", "there"], 0..=2),
        ) {
            let endpoints: BTreeMap<_, _> = endpoints.into_values().collect();
            let of = |wanted: &dyn Fn(&SliceEndpoint) -> bool| {
                let mut candidates = Candidates::default();
                for (address, endpoint) in endpoints.iter().filter(|(_, endpoint)| wanted(endpoint)) {
                    candidates.add(*address, endpoint, TOPOLOGY);
                }
                candidates
            };
            let whole = of(&|_| true);
            let remaining = of(&|endpoint| {
                let node = endpoint.node_name.as_deref();
                node == Some("here") || !node.is_some_and(|node| silent.contains(&node))
            });
            let mut candidates = of(&|_| true);
            let nodes: BTreeSet<_> = silent.iter().map(|&node| node.to_owned()).collect();
            let any = candidates.leave_out(&nodes.into(), &BTreeSet::new());
            let expected = if remaining.any_usable() { &remaining } else { &whole };
            prop_assert_eq!(any, expected.all.len() < whole.all.len());
            let list = cluster(&candidates);
            prop_assert_eq!(&list, &cluster(expected));
            prop_assert_eq!(list.is_empty(), !whole.any_usable(), "never the last ones");
            prop_assert_eq!(candidates.any_usable(), whole.any_usable());
            prop_assert_eq!(candidates.local(), whole.local());
            for protocol in [Protocol::Tcp, Protocol::Sctp] {
                prop_assert_eq!(candidates.serving(protocol), whole.serving(protocol));
            }
            let udp = candidates.serving(Protocol::Udp);
            prop_assert_eq!(&udp, &expected.serving(Protocol::Udp));
            prop_assert!(list.iter().chain(&candidates.local()).all(|e| udp.contains(&e.address)));
        }
    }

    /// Otherwise a zone whose only endpoint is silent would have no endpoint.
    #[test]
    fn hints_are_those_of_the_remaining_endpoints() {
        let endpoint = |last: u8, node: &str, zone: &str| SliceEndpoint {
            address: [10, 0, 0, last].into(),
            node_name: Some(node.into()),
            ready: true,
            serving: true,
            terminating: false,
            for_zones: vec![zone.into()],
            for_nodes: Vec::new(),
            pod: None,
        };
        let endpoints =
            [endpoint(1, "there", "zone-a"), endpoint(2, "far", "zone-b"), endpoint(3, "farther", "zone-b")];
        let list = |silent: &[&str]| {
            let mut candidates = Candidates::default();
            for endpoint in &endpoints {
                candidates.add(SocketAddr::new(endpoint.address, 80), endpoint, TOPOLOGY);
            }
            let nodes: BTreeSet<_> = silent.iter().map(|&node| node.to_owned()).collect();
            candidates.leave_out(&nodes.into(), &BTreeSet::new());
            let last = |endpoint: &Endpoint| endpoint.address.to_string();
            cluster(&candidates).iter().map(last).collect::<Vec<_>>()
        };
        assert_eq!(list(&[]), ["10.0.0.1:80"]);
        assert_eq!(list(&["there"]), ["10.0.0.2:80", "10.0.0.3:80"]);
        assert_eq!(list(&["there", "far", "farther"]), ["10.0.0.1:80"], "the last ones");
    }
}
