//! The reference plugin `bridge` with `isGateway`, `hairpinMode` and `ipMasq`, and plain routes
//! between nodes, which it leaves to others.
//! <https://github.com/containernetworking/plugins/blob/main/plugins/main/bridge/bridge.go>,
//! <https://github.com/containernetworking/plugins/blob/main/pkg/ip/ipmasq_iptables_linux.go>

use std::fmt::Write as _;

use super::{Layout, Link, both, written};
use crate::family::Family;
use crate::lab::{Node, Pod};
use crate::netlink::Mac;

pub(super) struct Bridge;

impl Layout for Bridge {
    fn link(&self) -> &'static dyn Link {
        &Port
    }

    fn node(&self, node: &Node) -> String {
        device(node, self.mtu())
    }

    fn ways(&self, _here: &Node, there: &Node) -> String {
        by_node(there)
    }

    /// The network is that of the node's own pods: connections to pods of other nodes are
    /// masqueraded, too.
    fn iptables(&self, node: &Node, family: Family) -> Option<String> {
        let multicast = if family == Family::V4 { "224.0.0.0/4" } else { "ff00::/8" };
        let mut rules = String::from("*nat\n");
        for pod in &node.pods {
            let (chain, address) = (format!("CNI-{}", pod.name), pod.address(family));
            writeln!(rules, ":{chain} - [0:0]").ok()?;
            writeln!(rules, "-A POSTROUTING -s {address} -j {chain}").ok()?;
            writeln!(rules, "-A {chain} -d {} -j ACCEPT", node.pods(family)).ok()?;
            writeln!(rules, "-A {chain} ! -d {multicast} -j MASQUERADE").ok()?;
        }
        Some(rules + "COMMIT\n")
    }
}

/// A veth whose end on the node is a port of `cni0`.
pub(super) struct Port;

impl Link for Port {
    fn bridge(&self) -> Option<&'static str> {
        Some("cni0")
    }

    fn host_end(&self, node: u8, pod: u8) -> (String, Option<Mac>) {
        host_end(node, pod)
    }

    fn host(&self, _node: &Node, _pod: &Pod, device: &str) -> String {
        format!("link set {device} type bridge_slave hairpin on\n")
    }

    fn pod(&self, node: &Node, pod: &Pod) -> String {
        let gateway = node.pods_gateway();
        both(|family| {
            let options = if family == Family::V6 { " nodad" } else { "" };
            format!("addr add {}/{} dev eth0{options}", pod.address(family), family.prefix())
        }) + &both(|family| format!("route add default via {}", gateway.of(family)))
    }
}

/// A name as `ip.RandomVethName` of the plugins makes it: veth and eight digits.
pub(super) fn host_end(node: u8, pod: u8) -> (String, Option<Mac>) {
    (format!("veth{node:04x}{pod:04x}"), None)
}

/// Commands that make the bridge `cni0`. Snooping is off: without a querier on the network it would
/// only delay neighbour discovery.
pub(super) fn device(node: &Node, mtu: u32) -> String {
    let gateway = node.pods_gateway();
    let mac = written(gateway.mac());
    let mut lines =
        format!("link add cni0 address {mac} mtu {mtu} type bridge mcast_snooping 0 forward_delay 0\n");
    lines += &both(|family| {
        let options = if family == Family::V6 { " nodad" } else { "" };
        format!("addr add {}/{} dev cni0{options}", gateway.of(family), family.prefix())
    });
    lines + "link set cni0 up\n"
}

/// The route to a node's pods leads to the node.
pub(super) fn by_node(there: &Node) -> String {
    both(|family| format!("route replace {} via {} dev eth0", there.pods(family), there.address(family)))
}
