//! The Lease by which a node takes part in direct forwarding.

use std::net::IpAddr;

use serde_json::{Value, json};
use traffic_policy_ebpf::hash::MAGLEV_SEED;

use crate::lab::{Addresses, Family, Lab, Node};

/// Returns the Lease of a node that opens packets of these families and of all protocols, whatever
/// of this list they travel in, the preferred one first.
pub fn opens_dispatch(node: &Node, families: &[Family], dispatch: &str) -> Value {
    let mut lease = opens(node, families);
    lease["metadata"]["annotations"]["traffic-policy.io/opens-dispatch"] = dispatch.into();
    lease["metadata"]["annotations"]["traffic-policy.io/opens-protocols"] = "tcp,udp,sctp".into();
    lease
}

/// Returns the Lease of a node that opens such packets, and sends replies back through the node in
/// front if that asks for it.
pub fn tunnels(node: &Node, families: &[Family], dispatch: &str) -> Value {
    let mut lease = opens_dispatch(node, families, dispatch);
    lease["metadata"]["annotations"]["traffic-policy.io/opens-reply"] = "tunnel".into();
    lease
}

/// Returns the Lease that [`tunnels`] does, of a node from which outer packets come as the lab's
/// layout says: with the address that leads to other nodes' pods as source.
pub fn tunnels_in(lab: &Lab, node: &Node, dispatch: &str) -> Value {
    let from = Family::BOTH
        .map(|family| [node.address(family), lab.source_towards_pods(node, family)].map(|ip| ip.to_string()));
    let mut from = from.concat();
    from.dedup();
    let mut lease = tunnels(node, &Family::BOTH, dispatch);
    lease["metadata"]["annotations"]["traffic-policy.io/opens-from"] = from.join(",").into();
    lease
}

/// Returns the Lease that [`tunnels`] does, for a node of this name with these addresses.
pub fn tunnels_at(name: &str, addresses: &Addresses) -> Value {
    let mut lease = opens_from(name, &Family::BOTH.map(|family| addresses.of(family)));
    let annotations = &mut lease["metadata"]["annotations"];
    annotations["traffic-policy.io/opens-dispatch"] = "ipip,udp".into();
    annotations["traffic-policy.io/opens-protocols"] = "tcp,udp,sctp".into();
    annotations["traffic-policy.io/opens-reply"] = "tunnel".into();
    lease
}

/// Returns the Lease of a node that opens packets of both families, and takes those that are sent
/// to its MAC address as they are, if its settings that decide which endpoint it finds are these:
/// by default the sender's, an agent with a Maglev table of 251 slots.
pub fn takes(node: &Node, choice: Option<&str>) -> Value {
    let mut lease = opens_dispatch(node, &Family::BOTH, "ipip,udp,l2");
    let mac = node.addresses.mac().map(|byte| format!("{byte:02x}")).join(":");
    lease["metadata"]["annotations"]["traffic-policy.io/opens-l2-at"] = mac.into();
    let ours = format!("direct maglev 251 {MAGLEV_SEED:x}");
    lease["metadata"]["annotations"]["traffic-policy.io/opens-l2-by"] = choice.unwrap_or(&ours).into();
    lease
}

/// Returns the Lease of a node that opens packets of these families, IP within IP, and none of
/// SCTP, as earlier agents write it.
pub fn opens(node: &Node, families: &[Family]) -> Value {
    let addresses: Vec<_> = families.iter().map(|family| node.address(*family)).collect();
    opens_from(&node.name, &addresses)
}

/// Returns such a Lease of the node with this name, for packets from these of its addresses.
pub fn opens_from(node: &str, addresses: &[IpAddr]) -> Value {
    let addresses: Vec<_> = addresses.iter().map(ToString::to_string).collect();
    json!({
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {
            "namespace": "traffic-policy",
            "name": format!("traffic-policy-opens-{node}"),
            "labels": {"traffic-policy.io/opens": "ipip"},
            "annotations": {"traffic-policy.io/opens-from": addresses.join(", ")},
        },
        "spec": {"holderIdentity": node},
    })
}
