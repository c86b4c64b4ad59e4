//! Node objects.

use std::net::IpAddr;

use serde_json::{Value, json};

use crate::lab::{Addresses, Family, Node};

/// The Node object of a lab's node.
pub fn object(node: &Node) -> Value {
    of_both_families(&node.name, &node.addresses, &node.pod_network)
}

/// The Node object with one address, and one network of pods, of each family.
pub fn of_both_families(name: &str, addresses: &Addresses, pods: &Addresses) -> Value {
    let network = |family: Family| format!("{}/{}", pods.of(family), family.prefix());
    with_addresses(name, &Family::BOTH.map(|family| addresses.of(family)), &Family::BOTH.map(network))
}

/// The Node object with these addresses and networks of pods.
pub fn with_addresses(name: &str, addresses: &[IpAddr], networks: &[String]) -> Value {
    let addresses = addresses.iter().map(|address| json!({"type": "InternalIP", "address": address}));
    let hostname = json!({"type": "Hostname", "address": name});
    json!({
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name}},
        "spec": {"podCIDR": networks[0], "podCIDRs": networks},
        "status": {
            "addresses": addresses.chain([hostname]).collect::<Vec<_>>(),
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    })
}
