//! kindnet on a node of kind: the plugin `ptp`, plain routes between nodes, and a masquerade in
//! nftables. The node is a container whose eth0 is a veth as the kernel makes it, with checksum
//! offload; its other end is a port of a bridge outside.
//! <https://github.com/kubernetes-sigs/kindnet/blob/main/pkg/masq/masq.go>,
//! <https://github.com/kubernetes-sigs/kind/blob/main/images/kindnetd/cmd/kindnetd/cni.go>,
//! <https://github.com/containernetworking/plugins/blob/main/plugins/main/ptp/ptp.go>

use super::{Layout, Link, alone, both, bridge};
use crate::family::Family;
use crate::lab::{Node, Pod};
use crate::netlink::Mac;

pub(super) struct Kindnet;

impl Link for Kindnet {
    fn host_end(&self, node: u8, pod: u8) -> (String, Option<Mac>) {
        bridge::host_end(node, pod)
    }

    /// The device of every pod has the same address, that of the gateway.
    fn host(&self, node: &Node, pod: &Pod, device: &str) -> String {
        let gateway = node.pods_gateway();
        both(|family| {
            let options = if family == Family::V6 { " nodad" } else { "" };
            format!("addr add {}/{} dev {device}{options}", gateway.of(family), alone(family))
        }) + &both(|family| {
            let scope = if family == Family::V4 { " scope host" } else { "" };
            format!("route add {}/{} dev {device}{scope}", pod.address(family), alone(family))
        })
    }

    fn pod(&self, node: &Node, pod: &Pod) -> String {
        let gateway = node.pods_gateway();
        both(|family| {
            let options = if family == Family::V6 { " nodad" } else { "" };
            format!("addr add {}/{} dev eth0 noprefixroute{options}", pod.address(family), family.prefix())
        }) + &both(|family| {
            let scope = if family == Family::V4 { " scope link" } else { "" };
            format!("route add {} dev eth0{scope} src {}", gateway.of(family), pod.address(family))
        }) + &both(|family| {
            let gateway = gateway.of(family);
            format!("route add {} via {gateway} src {}", node.pods(family), pod.address(family))
        }) + &both(|family| format!("route add default via {} dev eth0", gateway.of(family)))
    }
}

impl Layout for Kindnet {
    fn link(&self) -> &'static dyn Link {
        &Self
    }

    fn node(&self, _node: &Node) -> String {
        String::new()
    }

    fn ways(&self, _here: &Node, there: &Node) -> String {
        bridge::by_node(there)
    }

    fn nftables(&self, nodes: &[Node]) -> Option<String> {
        let ranges = |family| nodes.iter().map(|node| node.pods(family)).collect::<Vec<_>>().join(", ");
        Some(format!(
            "table inet kindnet-ipmasq {{\n\
               set noMasqV4 {{ type ipv4_addr; flags interval; auto-merge; elements = {{ {} }} }}\n\
               set noMasqV6 {{ type ipv6_addr; flags interval; auto-merge; elements = {{ {} }} }}\n\
               chain postrouting {{\n\
                 type nat hook postrouting priority srcnat - 10; policy accept;\n\
                 ct state established,related accept\n\
                 fib daddr type local accept\n\
                 ip daddr @noMasqV4 accept\n\
                 ip6 daddr @noMasqV6 accept\n\
                 masquerade\n\
               }}\n\
             }}\n",
            ranges(Family::V4),
            ranges(Family::V6)
        ))
    }
}
