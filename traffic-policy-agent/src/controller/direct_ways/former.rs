//! Ways to other nodes as an earlier agent has found them, by its maps.

use std::{collections::BTreeMap, path::Path};

use anyhow::Result;
use traffic_policy_cluster::model::{Dispatch, Forwarding, Passing, Way, Ways};
use traffic_policy_dataplane::inspect::{Nodes, Pinned, ServicePort};

use super::Other;

/// Reads from maps what packets to each node travel in. Where Services are forwarded directly and
/// packets of no endpoint of a node are, an earlier agent has found that none gets there.
pub(super) fn ways(pins: &Path) -> Result<Ways> {
    let pinned = Pinned::open(pins)?;
    let nodes = Nodes::read(&pinned)?;
    let mut found: BTreeMap<Other, [Option<Passing>; 2]> = BTreeMap::new();
    let ports = ServicePort::all(&pinned)?.into_iter().filter(|port| port.forwarding.is_direct());
    for port in ports {
        for endpoint in port.cluster.iter().filter(|endpoint| endpoint.remote) {
            let Some(node) = nodes.name(endpoint.node) else { continue };
            if endpoint.held.is_some() {
                continue;
            }
            let of = found.entry((node.to_owned(), port.key.ipv6)).or_default();
            let passing = of[usize::from(port.forwarding == Forwarding::Tunnel)].get_or_insert(Passing::NONE);
            match endpoint.opens.map(Dispatch::within) {
                Some(Dispatch::Udp) => passing.within_udp = true,
                Some(_) => *passing = Passing::ALL,
                None => {}
            }
        }
    }
    let mut ways = Ways::default();
    for ((node, ipv6), [direct, tunnel]) in found {
        // No Service is forwarded in the other way now.
        let unseen = Passing::NONE;
        let way = Way { direct: direct.unwrap_or(unseen), tunnel: tunnel.unwrap_or(unseen) };
        ways.set(&node, ipv6, way);
    }
    Ok(ways)
}
