//! Former owners of a Service's Maglev slots, as `services NAME` shows them.

use serde::Serialize;
use traffic_policy_cluster::model::Endpoint;
use traffic_policy_dataplane::inspect::{FormerOwner, FormerOwners, Nodes};

use crate::command::view;

/// The former owners of a Service port's slots that are still asked, for programs.
#[derive(Serialize)]
pub(super) struct Document {
    /// The number of slots that have one.
    slots: u32,
    /// The seconds until they are asked no more.
    seconds_left: f64,
    endpoints: Vec<OwnerDocument>,
}

#[derive(Serialize)]
struct OwnerDocument {
    address: String,
    /// Whether the endpoint is on this node.
    local: bool,
    /// The name of its node; `None` if it is this one, or the endpoint has no `nodeName`.
    node: Option<String>,
    /// The slots that it had.
    slots: u32,
    /// Whether this node asks it for what the present owner does not know: its pod, if that is
    /// here, or its node, to which the packet is sent on.
    asked: bool,
}

impl Document {
    pub(super) fn new(former: &FormerOwners, nodes: &Nodes) -> Self {
        let owner = |owner: &FormerOwner| OwnerDocument {
            address: owner.endpoint.address.to_string(),
            local: owner.endpoint.local,
            node: nodes.name(owner.endpoint.node).map(str::to_owned),
            slots: owner.slots,
            asked: is_asked(owner),
        };
        Self {
            slots: former.slots,
            seconds_left: former.left.as_secs_f64(),
            endpoints: former.owners.iter().map(owner).collect(),
        }
    }
}

/// Whether an owner is asked: its pod, if that is here, or its node, if that opens packets.
fn is_asked(owner: &FormerOwner) -> bool {
    owner.endpoint.local || opens(owner.endpoint)
}

fn opens(endpoint: Endpoint) -> bool {
    endpoint.opens.or(endpoint.held).is_some()
}

/// Returns the lines of the text output; JSON has the same facts.
pub(super) fn lines(former: &FormerOwners, nodes: &Nodes) -> Vec<String> {
    let all = format!(
        "owners of {} slots, asked for connections that the present ones do not know, for {} more:",
        former.slots,
        view::span(former.left)
    );
    let each = former.owners.iter().map(|owner| {
        let endpoint = owner.endpoint;
        let node = match nodes.name(endpoint.node) {
            _ if endpoint.local => "  (here)".to_owned(),
            Some(node) => format!("  on {node}"),
            None => String::new(),
        };
        let not = if is_asked(owner) { "" } else { ", not asked: its node opens no packets" };
        format!("{}{node}, of {} slots{not}", endpoint.address, owner.slots)
    });
    [all].into_iter().chain(each).collect()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use traffic_policy_cluster::model::{Dispatch, Endpoint};

    use super::*;

    #[test]
    fn who_is_asked_and_who_is_not() {
        let owner = |last: u8, node: u16, opens: bool, slots: u32| FormerOwner {
            endpoint: Endpoint {
                address: ([10, 244, node as u8, last], 8080).into(),
                local: node == 0,
                remote: node != 0,
                opens: opens.then_some(Dispatch::Ipip),
                held: None,
                node,
                weight: 1,
            },
            slots,
        };
        let former = FormerOwners {
            slots: 84,
            left: Duration::from_secs(200),
            owners: vec![owner(2, 0, true, 12), owner(3, 2, true, 70), owner(4, 3, false, 5)],
        };
        let nodes = Nodes::of(&[(2, "node-2", false), (3, "node-3", false)]);
        assert_eq!(
            lines(&former, &nodes),
            [
                "owners of 84 slots, asked for connections that the present ones do not know, for 3m20s more:",
                "10.244.0.2:8080  (here), of 12 slots",
                "10.244.2.3:8080  on node-2, of 70 slots",
                "10.244.3.4:8080  on node-3, of 5 slots, not asked: its node opens no packets",
            ]
        );
        let document = serde_json::to_value(Document::new(&former, &nodes)).unwrap();
        assert_eq!((&document["slots"], &document["seconds_left"]), (&84.into(), &200.0.into()));
        let asked: Vec<_> =
            document["endpoints"].as_array().unwrap().iter().map(|one| one["asked"] == true).collect();
        assert_eq!(asked, [true, true, false]);
    }
}
