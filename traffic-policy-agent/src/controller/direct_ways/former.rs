//! Ways to other nodes as an earlier agent has found them, by its maps.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};

use anyhow::Result;
use traffic_policy_cluster::model::{Dispatch, Forwarding, Passing, ServiceName, Way, Ways};
use traffic_policy_dataplane::inspect::{Nodes, Pinned, ServicePort};

use super::Other;

/// The findings of an earlier agent.
#[derive(Default)]
pub(super) struct Former {
    pub(super) ways: Ways,
    /// The Services of which packets go by MAC address.
    pub(super) by_mac: BTreeSet<ServiceName>,
}

/// The outer packets of one family to one node, of those whose replies take their own way and of
/// those whose replies come back, and whether any packets go by MAC address.
#[derive(Default)]
struct Found {
    passing: [Option<Passing>; 2],
    by_mac: bool,
}

/// Reads from maps what packets to each node travel in. Where Services are forwarded directly and
/// packets of no endpoint of a node are, an earlier agent has found that none gets there.
pub(super) fn find(pins: &Path) -> Result<Former> {
    let pinned = Pinned::open(pins)?;
    let nodes = Nodes::read(&pinned)?;
    let mut found: BTreeMap<Other, Found> = BTreeMap::new();
    let mut former = Former::default();
    let ports = ServicePort::all(&pinned)?.into_iter().filter(|port| port.forwarding.is_direct());
    for port in ports {
        for endpoint in port.cluster.iter().filter(|endpoint| endpoint.remote) {
            let Some(node) = nodes.name(endpoint.node) else { continue };
            if endpoint.held.is_some() {
                continue;
            }
            let of = found.entry((node.to_owned(), port.key.ipv6)).or_default();
            if port.forwarding == Forwarding::Direct && matches!(endpoint.opens, Some(Dispatch::L2 { .. })) {
                of.by_mac = true;
                former.by_mac.insert(port.key.service.clone());
            }
            let passing =
                of.passing[usize::from(port.forwarding == Forwarding::Tunnel)].get_or_insert(Passing::NONE);
            match endpoint.opens.map(Dispatch::within) {
                Some(Dispatch::Udp) => passing.within_udp = true,
                Some(_) => *passing = Passing::ALL,
                None => {}
            }
        }
    }
    for ((node, ipv6), Found { passing: [direct, tunnel], by_mac }) in found {
        // No Service is forwarded in the other way now.
        let unseen = Passing::NONE;
        let way = Way { direct: direct.unwrap_or(unseen), tunnel: tunnel.unwrap_or(unseen), by_mac };
        former.ways.set(&node, ipv6, way);
    }
    Ok(former)
}
