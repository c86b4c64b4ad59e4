//! Node objects.

use serde_json::{Value, json};

use crate::lab::{Family, Node};

/// The Node object of a lab's node.
pub fn object(node: &Node) -> Value {
    let addresses = Family::BOTH.map(|family| json!({"type": "InternalIP", "address": node.address(family)}));
    let networks = Family::BOTH.map(|family| format!("{}/{}", node.pod_network.of(family), family.prefix()));
    let mut addresses = addresses.to_vec();
    addresses.push(json!({"type": "Hostname", "address": node.name}));
    json!({
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": node.name, "labels": {"kubernetes.io/hostname": node.name}},
        "spec": {"podCIDR": networks[0], "podCIDRs": networks},
        "status": {
            "addresses": addresses,
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    })
}
