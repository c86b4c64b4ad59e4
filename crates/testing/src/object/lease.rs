//! The Lease by which a node takes part in direct forwarding.

use serde_json::{Value, json};

use crate::lab::{Family, Node};

/// Returns the Lease of a node that opens packets of these families, whatever of this list they
/// travel in, the preferred one first.
pub fn opens_dispatch(node: &Node, families: &[Family], dispatch: &str) -> Value {
    let mut lease = opens(node, families);
    lease["metadata"]["annotations"]["traffic-policy.io/opens-dispatch"] = dispatch.into();
    lease
}

/// Returns the Lease of a node that opens such packets, and sends replies back through the node in
/// front if that asks for it.
pub fn tunnels(node: &Node, families: &[Family], dispatch: &str) -> Value {
    let mut lease = opens_dispatch(node, families, dispatch);
    lease["metadata"]["annotations"]["traffic-policy.io/opens-reply"] = "tunnel".into();
    lease
}

/// Returns the Lease of a node that opens packets of these families, IP within IP.
pub fn opens(node: &Node, families: &[Family]) -> Value {
    let addresses: Vec<_> = families.iter().map(|family| node.address(*family).to_string()).collect();
    json!({
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {
            "namespace": "traffic-policy",
            "name": format!("traffic-policy-opens-{}", node.name),
            "labels": {"traffic-policy.io/opens": "ipip"},
            "annotations": {"traffic-policy.io/opens-from": addresses.join(", ")},
        },
        "spec": {"holderIdentity": node.name},
    })
}
