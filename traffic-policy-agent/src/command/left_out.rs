//! Endpoints that the agent leaves out because their node, or their next hop, is dead. The agent is
//! asked for them: the maps have the dead nodes, not the endpoints taken out of the lists.

use traffic_policy_cluster::model::ServicePortKey;
use traffic_policy_dataplane::inspect::{DeadNode, Heartbeat, Nodes, Pinned, Presence};

use super::{report, view};
use crate::health::EndpointLeftOut;

/// Asks the agent for the endpoints that it leaves out, if any node is dead. `None`: no agent
/// answers.
pub(super) fn endpoints(pinned: &Pinned, nodes: &Nodes) -> Option<Vec<EndpointLeftOut>> {
    if nodes.dead().is_empty() {
        return Some(Vec::new());
    }
    if !matches!(Presence::read(pinned).ok()?, Presence::Running { .. }) {
        return None;
    }
    let address = Heartbeat::read(pinned).ok()?.address()?;
    Some(report::of(address).ok()?.endpoints_left_out)
}

/// Returns a line for each endpoint of a Service port that is left out; if no agent tells, for each
/// dead node.
pub(super) fn lines(
    key: &ServicePortKey,
    nodes: &Nodes,
    left_out: Option<&[EndpointLeftOut]>,
) -> Vec<String> {
    let since = |node: &DeadNode| {
        node.silent.map(|silent| format!(" for {}", view::span(silent))).unwrap_or_default()
    };
    match left_out {
        Some(all) => {
            let of_port = all.iter().filter(|one| one.key().as_ref() == Some(key));
            of_port
                .map(|one| match &one.node {
                    Some(node) => {
                        let dead = nodes.dead().iter().find(|dead| dead.name == *node);
                        format!("{} on {node}, dead{}", one.address, dead.map(since).unwrap_or_default())
                    }
                    None => format!("{}, its next hop is dead", one.address),
                })
                .collect()
        }
        None => {
            let dead = nodes.dead().iter();
            dead.map(|node| format!("any endpoint on {}, dead{}", node.name, since(node))).collect()
        }
    }
}
