//! Silent nodes in an [`Index`]: endpoints that take no new flows although Kubernetes still counts
//! them as ready.
//!
//! Each question here is a walk over the endpoints of all slices, a twentieth of the cost of an
//! update of all Services. They are asked when a node is suspected or changes its state; a table of
//! endpoints by node would cost memory, and time at each change of a slice, instead.

use std::{
    collections::{BTreeMap, BTreeSet, btree_set},
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use super::{
    super::{
        Protocol, ServicePortKey, Silent,
        object::{EndpointSlice, SliceEndpoint},
        topology::is_usable,
    },
    Index,
};

impl Index {
    /// Sets whose endpoints take no new flows, from the next [`Index::update`] on; this node's own
    /// name has no effect. Only Services with endpoints that came or went are examined again.
    /// Returns whether anything changed.
    pub fn leave_out(&mut self, silent: impl Into<Silent>) -> bool {
        let silent = silent.into();
        if *self.context.silent == silent {
            return false;
        }
        let silent = Arc::new(silent);
        let former = std::mem::replace(&mut self.context.silent, Arc::clone(&silent));
        self.concern(&former.nodes, &silent.nodes);
        let differ: BTreeSet<_> = former.addresses.symmetric_difference(&silent.addresses).collect();
        if !differ.is_empty() {
            let is_concerned =
                |endpoint: &SliceEndpoint| endpoint.node_name.is_none() && differ.contains(&endpoint.address);
            self.concern_services(is_concerned);
        }
        true
    }

    /// Takes over the nodes that are about to go, in the same way.
    pub(super) fn avoid_leaving(&mut self) {
        if *self.context.leaving != *self.leaving_nodes() {
            let nodes = Arc::new(self.leaving_nodes().clone());
            let former = std::mem::replace(&mut self.context.leaving, Arc::clone(&nodes));
            self.concern(&former, &nodes);
        }
    }

    /// Marks the Services with endpoints on nodes that are in one of two sets.
    pub(super) fn concern(&mut self, former: &BTreeSet<String>, nodes: &BTreeSet<String>) {
        self.concern_nodes(&former.symmetric_difference(nodes).map(String::as_str).collect());
    }

    /// Marks the Services with endpoints on these nodes.
    pub(super) fn concern_nodes(&mut self, nodes: &BTreeSet<&str>) {
        if nodes.is_empty() {
            return;
        }
        self.concern_services(|endpoint| {
            endpoint.node_name.as_deref().is_some_and(|node| nodes.contains(node))
        });
    }

    fn concern_services(&mut self, is_concerned: impl Fn(&SliceEndpoint) -> bool) {
        let slices = self.slices.values().filter(|slice| slice.endpoints.iter().any(&is_concerned));
        self.dirty.extend(slices.map(EndpointSlice::service_name));
    }

    /// The nodes whose endpoints take no new flows.
    pub fn left_out(&self) -> btree_set::Iter<'_, String> {
        self.context.silent.nodes.iter()
    }

    /// The endpoints that are left out because they are silent, as of the last [`Index::update`]:
    /// those that could take new flows otherwise, each with its node's name, if it has one.
    #[must_use]
    pub fn left_out_endpoints(&self) -> BTreeMap<ServicePortKey, BTreeSet<(SocketAddr, Option<String>)>> {
        let mut found: BTreeMap<_, BTreeSet<_>> = BTreeMap::new();
        let silent = &self.context.silent;
        if **silent == Silent::default() {
            return found;
        }
        for slice in self.slices.values() {
            let endpoints =
                slice.endpoints.iter().filter(|endpoint| is_usable(endpoint) && silent.has(endpoint));
            for (endpoint, port) in
                endpoints.flat_map(|endpoint| slice.ports.iter().map(move |port| (endpoint, port)))
            {
                let key = ServicePortKey {
                    service: slice.service_name(),
                    port: port.name.clone(),
                    protocol: port.protocol,
                    ipv6: slice.ipv6,
                };
                let address = SocketAddr::new(endpoint.address, port.port);
                let Some(served) = self.desired.ports.get(&key) else { continue };
                if !served.cluster.iter().any(|listed| listed.address == address) {
                    let node = endpoint.node_name.as_deref().map(str::to_owned);
                    found.entry(key).or_default().insert((address, node));
                }
            }
        }
        found
    }

    /// Keeps the numbers of nodes that an earlier agent has given.
    pub fn keep_node_numbers(&mut self, names: impl IntoIterator<Item = (u16, String)>) {
        Arc::make_mut(&mut self.context.numbers).keep(names);
    }

    /// Returns the numbers that nodes were given since the last call, with their names.
    pub fn take_new_node_numbers(&mut self) -> Vec<(u16, String)> {
        Arc::make_mut(&mut self.context.numbers).take_new()
    }

    /// The nodes with at least one endpoint that can take new flows, whether or not they are left
    /// out.
    #[must_use]
    pub fn nodes_of_endpoints(&self) -> BTreeSet<&str> {
        let endpoints = self.slices.values().flat_map(|slice| &slice.endpoints);
        endpoints
            .filter(|endpoint| is_usable(endpoint))
            .filter_map(|endpoint| endpoint.node_name.as_deref())
            .collect()
    }

    /// A few usable endpoints of a node, at most `most` of each protocol, and each pod once for a
    /// protocol.
    #[must_use]
    pub fn endpoints_of(&self, node: &str, most: usize) -> Vec<(SocketAddr, Protocol)> {
        self.some_endpoints(|endpoint| endpoint.node_name.as_deref() == Some(node), most)
    }

    /// Each node with usable endpoints, and the address of one of them for each family.
    #[must_use]
    pub fn endpoint_of_each_node(&self) -> Vec<(String, IpAddr)> {
        let mut found = BTreeMap::new();
        for endpoint in self.slices.values().flat_map(|slice| &slice.endpoints) {
            if let Some(node) = endpoint.node_name.as_deref().filter(|_| is_usable(endpoint)) {
                found.entry((node, endpoint.address.is_ipv6())).or_insert(endpoint.address);
            }
        }
        found.into_iter().map(|((node, _), address)| (node.to_owned(), address)).collect()
    }

    /// The addresses of usable endpoints without a `nodeName`: at most `most`, which may be in
    /// several slices.
    #[must_use]
    pub fn endpoints_without_node(&self, most: usize) -> BTreeSet<IpAddr> {
        let mut found = BTreeSet::new();
        for endpoint in self.slices.values().flat_map(|slice| &slice.endpoints) {
            if endpoint.node_name.is_none() && is_usable(endpoint) {
                found.insert(endpoint.address);
                if found.len() >= most {
                    break;
                }
            }
        }
        found
    }

    /// A few usable endpoints without a `nodeName` that have one of these addresses, as
    /// [`Self::endpoints_of`] a node.
    #[must_use]
    pub fn endpoints_at(&self, addresses: &BTreeSet<IpAddr>, most: usize) -> Vec<(SocketAddr, Protocol)> {
        self.some_endpoints(
            |endpoint| endpoint.node_name.is_none() && addresses.contains(&endpoint.address),
            most,
        )
    }

    fn some_endpoints(
        &self,
        is_one: impl Fn(&SliceEndpoint) -> bool,
        most: usize,
    ) -> Vec<(SocketAddr, Protocol)> {
        let mut found: Vec<(SocketAddr, Protocol)> = Vec::new();
        for slice in self.slices.values() {
            let here = slice.endpoints.iter().filter(|endpoint| is_one(endpoint) && is_usable(endpoint));
            for (endpoint, port) in
                here.flat_map(|endpoint| slice.ports.iter().map(move |port| (endpoint, port)))
            {
                let same = found.iter().filter(|(_, protocol)| *protocol == port.protocol);
                if same.clone().count() < most
                    && !same.clone().any(|(found, _)| found.ip() == endpoint.address)
                {
                    found.push((SocketAddr::new(endpoint.address, port.port), port.protocol));
                }
            }
        }
        found
    }
}

#[cfg(test)]
mod tests;
