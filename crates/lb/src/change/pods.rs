//! Single pods of a Service: they start, become ready, terminate and are removed.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use traffic_policy_cluster::model::object::{Node, SliceEndpoint};

use super::{ChangeError, Objects, label};

/// The conditions of an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PodState {
    Ready,
    /// Terminating, but still serving.
    Terminating,
}

/// The hints of an endpoint that the EndpointSlice controller sets for `trafficDistribution`: its
/// own zone, its own node.
#[derive(Clone, Debug, Default)]
pub(super) struct OwnHints {
    zone: Option<Box<str>>,
    node: Option<Box<str>>,
}

impl OwnHints {
    pub(super) fn put(&self, endpoint: &mut SliceEndpoint) {
        endpoint.for_zones = self.zone.iter().cloned().collect();
        endpoint.for_nodes = self.node.iter().cloned().collect();
    }
}

impl Objects {
    /// Returns the hints that an endpoint would get on a node, judged by those of the Service.
    pub(super) fn hints_on(&self, node: &str) -> Result<OwnHints, ChangeError> {
        let (mut by_zone, mut by_node) = (false, false);
        for endpoint in self.endpoints() {
            // The zone of a node that is gone is not known.
            let Some(own) = endpoint.node_name.as_deref().and_then(|name| self.nodes.get(name)) else {
                continue;
            };
            let foreign =
                |hints: &[Box<str>], own: Option<&str>| hints.iter().any(|hint| Some(&**hint) != own);
            if foreign(&endpoint.for_zones, own.zone.as_deref())
                || foreign(&endpoint.for_nodes, Some(&own.name))
            {
                return Err(ChangeError::Hints(self.service.name.clone()));
            }
            by_zone |= !endpoint.for_zones.is_empty();
            by_node |= !endpoint.for_nodes.is_empty();
        }
        let zone = self.nodes.get(node).and_then(|node| node.zone.as_deref());
        Ok(OwnHints { zone: zone.filter(|_| by_zone).map(Into::into), node: by_node.then(|| node.into()) })
    }

    /// Puts a pod on a node, at addresses that no other pod has.
    pub(crate) fn put_pod(&mut self, pod: &str, node: &str, ready: bool) -> Result<(), ChangeError> {
        let taken: BTreeSet<IpAddr> = self.endpoints().map(|endpoint| endpoint.address).collect();
        let hints = self.hints_on(node)?;
        let mut families = BTreeSet::new();
        for slice in &mut self.slices {
            if !families.insert(slice.ipv6) {
                continue;
            }
            let free = (1u32..).map(|i| synthetic(slice.ipv6, i)).find(|address| !taken.contains(address));
            let Some(address) = free else { continue };
            let mut endpoint = SliceEndpoint {
                address,
                node_name: Some(node.into()),
                ready,
                serving: ready,
                terminating: false,
                for_zones: Vec::new(),
                for_nodes: Vec::new(),
                pod: Some(pod.into()),
            };
            hints.put(&mut endpoint);
            slice.endpoints.push(endpoint);
        }
        if families.is_empty() {
            return Err(ChangeError::NoEndpoints(self.service.name.clone()));
        }
        Ok(())
    }

    pub(crate) fn set_pod(&mut self, pod: &str, state: PodState) {
        for endpoint in self.slices.iter_mut().flat_map(|slice| &mut slice.endpoints) {
            if label(endpoint) == pod {
                endpoint.ready = state == PodState::Ready;
                endpoint.serving = true;
                endpoint.terminating = state == PodState::Terminating;
            }
        }
    }

    pub(crate) fn remove_pod(&mut self, pod: &str) {
        self.retain(|endpoint| label(endpoint) != pod);
    }

    pub(crate) fn cordon(&mut self, node: &str) {
        if let Some(node) = self.nodes.get_mut(node) {
            node.standing.unschedulable = true;
        }
    }

    /// Returns the node with the fewest pods, counting those that start but not those that
    /// terminate.
    pub(crate) fn emptiest_with_pending(&self) -> Result<String, ChangeError> {
        let mut pending: BTreeMap<&str, BTreeSet<String>> = BTreeMap::new();
        for endpoint in self.endpoints().filter(|endpoint| !endpoint.ready && !endpoint.terminating) {
            if let Some(node) = endpoint.node_name.as_deref() {
                pending.entry(node).or_default().insert(label(endpoint));
            }
        }
        let counts = self.counts();
        let usable = counts.iter().filter(|(_, (usable, _))| *usable);
        let found = usable
            .min_by_key(|(name, (_, count))| count + pending.get(name.as_str()).map_or(0, BTreeSet::len));
        found.map(|(name, _)| name.clone()).ok_or(ChangeError::NoRoom)
    }

    pub(crate) fn endpoints(&self) -> impl Iterator<Item = &SliceEndpoint> {
        self.slices.iter().flat_map(|slice| &slice.endpoints)
    }

    pub(crate) fn nodes(&self) -> impl Iterator<Item = &Node> {
        self.nodes.values()
    }
}

/// Returns an address for a pod that does not exist, from networks that are reserved for tests and
/// documentation.
fn synthetic(ipv6: bool, number: u32) -> IpAddr {
    if ipv6 {
        let base = u128::from(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 0));
        return Ipv6Addr::from(base + u128::from(number)).into();
    }
    Ipv4Addr::from(u32::from(Ipv4Addr::new(198, 18, 0, 0)) + number).into()
}
