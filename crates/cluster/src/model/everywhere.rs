//! The endpoints of one Service port as each node of a cluster chooses among them: the decision of
//! [`super::topology`], made for all nodes at once. The cost grows with the number of endpoints,
//! not with endpoints times nodes.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
};

use super::{
    object::SliceEndpoint,
    topology::{Hints, NodeTopology, Scope, eligible},
};

/// An endpoint with its port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place<'a> {
    pub address: SocketAddr,
    pub endpoint: &'a SliceEndpoint,
}

/// The identifier of a list in an [`Everywhere`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ListId(usize);

impl ListId {
    pub const EMPTY: Self = Self(0);
}

/// The endpoints of one Service port on each node. Nodes with the same endpoints share a list.
#[derive(Debug)]
pub struct Everywhere<'a> {
    lists: Vec<Vec<Place<'a>>>,
    /// The number of a list's endpoints on each node.
    counts: BTreeMap<(ListId, &'a str), usize>,
    /// The lists for policy Cluster.
    common: Scopes<'a>,
    /// The lists of nodes with an endpoint that another node also claims. Endpoints move between
    /// slices, and are briefly in both, perhaps on two nodes. The second node sees its own entry,
    /// which no other node does.
    contested: BTreeMap<&'a str, Scopes<'a>>,
    /// The lists for policy Local.
    local: BTreeMap<&'a str, ListId>,
    /// Ready endpoints by their node.
    ready: BTreeMap<&'a str, BTreeSet<SocketAddr>>,
}

/// The list of each scope.
#[derive(Debug, Default)]
struct Scopes<'a> {
    hints: Hints<'a>,
    lists: BTreeMap<Scope<'a>, ListId>,
}

impl<'a> Everywhere<'a> {
    /// Collects the endpoints of all slices, given in the order of the slices.
    pub(super) fn new(endpoints: impl Iterator<Item = (SocketAddr, &'a SliceEndpoint)>) -> Self {
        let mut first: BTreeMap<SocketAddr, &'a SliceEndpoint> = BTreeMap::new();
        // Among the entries of one address, the first that names a node counts on that node.
        let mut own: BTreeMap<&'a str, BTreeMap<SocketAddr, &'a SliceEndpoint>> = BTreeMap::new();
        let mut contested = BTreeSet::new();
        for (address, endpoint) in endpoints {
            let entry = *first.entry(address).or_insert(endpoint);
            if let Some(node) = endpoint.node_name.as_deref() {
                own.entry(node).or_default().entry(address).or_insert(endpoint);
                if entry.node_name.as_deref() != Some(node) {
                    contested.insert(node);
                }
            }
        }
        let mut everywhere = Self {
            lists: vec![Vec::new()],
            counts: BTreeMap::new(),
            common: Scopes::default(),
            contested: BTreeMap::new(),
            local: BTreeMap::new(),
            ready: BTreeMap::new(),
        };
        everywhere.common = everywhere.scopes(&first);
        for node in contested {
            let mut seen = first.clone();
            seen.extend(own.get(node).into_iter().flatten());
            let scopes = everywhere.scopes(&seen);
            everywhere.contested.insert(node, scopes);
        }
        for (node, endpoints) in own {
            let places = endpoints.iter().map(|(&address, &endpoint)| Place { address, endpoint });
            let ready: BTreeSet<_> =
                places.clone().filter(|place| place.endpoint.ready).map(|place| place.address).collect();
            if !ready.is_empty() {
                everywhere.ready.insert(node, ready);
            }
            let (list, _) = eligible(places, |place| place.endpoint);
            let list = everywhere.push(list);
            everywhere.local.insert(node, list);
        }
        everywhere
    }

    fn scopes(&mut self, endpoints: &BTreeMap<SocketAddr, &'a SliceEndpoint>) -> Scopes<'a> {
        let places = endpoints.iter().map(|(&address, &endpoint)| Place { address, endpoint });
        let (all, ready) = eligible(places, |place| place.endpoint);
        let hints = if ready { Hints::of(all.iter().map(|place| place.endpoint)) } else { Hints::default() };
        let mut by_scope: BTreeMap<Scope<'a>, Vec<Place<'a>>> = BTreeMap::new();
        for place in &all {
            if let Some(zones) = &hints.zones {
                let named: BTreeSet<&str> = place.endpoint.for_zones.iter().map(AsRef::as_ref).collect();
                for zone in zones.intersection(&named) {
                    by_scope.entry(Scope::Zone(zone)).or_default().push(*place);
                }
            }
            if hints.nodes.is_some() {
                let named: BTreeSet<&str> = place.endpoint.for_nodes.iter().map(AsRef::as_ref).collect();
                for node in named {
                    by_scope.entry(Scope::Node(node)).or_default().push(*place);
                }
            }
        }
        by_scope.insert(Scope::All, all);
        let lists = by_scope.into_iter().map(|(scope, list)| (scope, self.push(list))).collect();
        Scopes { hints, lists }
    }

    fn push(&mut self, list: Vec<Place<'a>>) -> ListId {
        if list.is_empty() {
            return ListId::EMPTY;
        }
        let id = ListId(self.lists.len());
        for place in &list {
            if let Some(node) = place.endpoint.node_name.as_deref() {
                *self.counts.entry((id, node)).or_default() += 1;
            }
        }
        self.lists.push(list);
        id
    }

    /// The list for policy Cluster on a node of a zone.
    #[must_use]
    pub fn cluster(&self, node_name: &str, zone: Option<&str>) -> ListId {
        let scopes = self.contested.get(node_name).unwrap_or(&self.common);
        let scope = scopes.hints.scope(NodeTopology { node_name, zone });
        scopes.lists.get(&scope).copied().unwrap_or(ListId::EMPTY)
    }

    /// The list for policy Local on a node.
    #[must_use]
    pub fn local(&self, node_name: &str) -> ListId {
        self.local.get(node_name).copied().unwrap_or(ListId::EMPTY)
    }

    #[must_use]
    pub fn list(&self, id: ListId) -> &[Place<'a>] {
        self.lists.get(id.0).map_or(&[], Vec::as_slice)
    }

    /// The number of a list's endpoints on a node.
    #[must_use]
    pub fn count(&self, id: ListId, node_name: &str) -> usize {
        self.counts.get(&(id, node_name)).copied().unwrap_or(0)
    }

    /// The number of ready endpoints on a node.
    #[must_use]
    pub fn ready(&self, node_name: &str) -> usize {
        self.ready.get(node_name).map_or(0, BTreeSet::len)
    }

    /// The nodes with ready endpoints, and these endpoints.
    pub fn ready_by_node(&self) -> impl Iterator<Item = (&'a str, &BTreeSet<SocketAddr>)> {
        self.ready.iter().map(|(node, addresses)| (*node, addresses))
    }

    /// The nodes that may differ from the others of their zone: those with an endpoint, and those
    /// that a hint names.
    #[must_use]
    pub fn special(&self) -> BTreeSet<&'a str> {
        let scopes = std::iter::once(&self.common).chain(self.contested.values());
        let hinted = scopes.flat_map(|scopes| scopes.hints.nodes.iter().flatten());
        self.local.keys().chain(hinted).copied().collect()
    }
}
