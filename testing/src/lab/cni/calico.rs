//! Calico with VXLAN: devices of pods without an address, a gateway that proxy ARP answers for, and a route for each pod.
//! <https://github.com/projectcalico/calico/blob/master/felix/dataplane/linux/endpoint_mgr.go> (`configureInterface`),
//! <https://github.com/projectcalico/calico/blob/master/felix/dataplane/linux/dataplanedefs/dataplane_defs.go>,
//! <https://docs.tigera.io/calico/latest/reference/resources/felixconfig> (VNI 4096, port 4789),
//! <https://docs.tigera.io/calico/latest/reference/faq> (169.254.1.1, ee:ee:ee:ee:ee:ee)

use std::fmt::Write as _;

use super::{Forwarding, Layout, Setting, alone, both, cluster_pods, flannel};
use crate::lab::plan::Family;
use crate::lab::{Node, Pod};
use crate::netlink::Mac;

pub(super) struct Vxlan;

const TUNNELS: [&str; 2] = ["vxlan.calico", "vxlan-v6.calico"];
const MAC: Mac = [0xee; 6];
/// The link-local address that the kernel makes of [`MAC`].
const GATEWAY_V6: &str = "fe80::ecee:eeff:feee:eeee";

impl Layout for Vxlan {
    fn mtu(&self) -> u32 {
        1450
    }

    fn host_end(&self, node: u8, pod: u8) -> (String, Option<Mac>) {
        (format!("cali{node:04x}{pod:07x}"), Some(MAC))
    }

    fn node(&self, node: &Node) -> String {
        // What is not a pod of this node is nowhere.
        let nowhere = both(|family| format!("route add blackhole {} proto 80", block(node, family)));
        flannel::tunnels(node, TUNNELS, 4096, 4789) + &nowhere
    }

    fn host(&self, _node: &Node, pod: &Pod, device: &str) -> String {
        both(|family| format!("route add {}/{} dev {device}", pod.address(family), alone(family)))
    }

    fn pod(&self, _node: &Node, pod: &Pod) -> String {
        let (v4, v6) = (pod.addresses.v4, pod.addresses.v6);
        format!(
            "addr add {v4}/32 dev eth0\n\
             addr add {v6}/128 dev eth0 nodad\n\
             route add 169.254.1.1 dev eth0 scope link\n\
             route add default via 169.254.1.1 dev eth0\n\
             route add default via {GATEWAY_V6} dev eth0\n"
        )
    }

    fn settings(&self, device: &str) -> Vec<Setting> {
        let v4 = |name: &str| format!("net.ipv4.conf.{device}.{name}");
        vec![
            (v4("route_localnet"), "1"),
            (format!("net.ipv4.neigh.{device}.proxy_delay"), "0"),
            (v4("proxy_arp"), "1"),
            (v4("forwarding"), "1"),
            (v4("rp_filter"), "1"),
            (format!("net.ipv6.conf.{device}.proxy_ndp"), "1"),
            (format!("net.ipv6.conf.{device}.forwarding"), "1"),
        ]
    }

    fn ways(&self, _here: &Node, there: &Node) -> String {
        flannel::through_tunnels(there, TUNNELS, |family| block(there, family))
    }

    fn forwarding(&self, there: &Node) -> Vec<Forwarding> {
        flannel::forwarding_entries(there, TUNNELS)
    }

    /// Without network policies. What conntrack cannot place is dropped on the way to a pod, as each of Calico's endpoint chains does.
    fn iptables(&self, node: &Node, family: Family) -> Option<String> {
        let all = cluster_pods(family);
        let tunnel = TUNNELS[usize::from(family == Family::V6)];
        let mut rules = format!(
            "*nat\n\
             :cali-POSTROUTING - [0:0]\n\
             :cali-nat-outgoing - [0:0]\n\
             -A POSTROUTING -j cali-POSTROUTING\n\
             -A cali-POSTROUTING -j cali-nat-outgoing\n\
             -A cali-POSTROUTING -o {tunnel} -m addrtype ! --src-type LOCAL --limit-iface-out -m addrtype --src-type LOCAL -j MASQUERADE --random-fully\n\
             -A cali-nat-outgoing -s {all} ! -d {all} -j MASQUERADE --random-fully\n\
             COMMIT\n\
             *filter\n\
             :cali-FORWARD - [0:0]\n\
             :cali-to-wl-dispatch - [0:0]\n\
             -A FORWARD -j cali-FORWARD\n\
             -A FORWARD -m mark --mark 0x10000/0x10000 -j ACCEPT\n\
             -A cali-FORWARD -j MARK --set-xmark 0x0/0xe0000\n\
             -A cali-FORWARD -o cali+ -j cali-to-wl-dispatch\n"
        );
        for (index, _) in (1..).zip(&node.pods) {
            let (device, _) = self.host_end(node.number, index);
            let chain = format!("cali-tw-{device}");
            write!(
                rules,
                ":{chain} - [0:0]\n\
                 -A cali-to-wl-dispatch -o {device} -g {chain}\n\
                 -A {chain} -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT\n\
                 -A {chain} -m conntrack --ctstate INVALID -j DROP\n\
                 -A {chain} -j MARK --set-xmark 0x10000/0x10000\n"
            )
            .ok()?;
        }
        Some(rules + "COMMIT\n")
    }
}

/// The block of addresses that a node has: 64 of each family.
fn block(node: &Node, family: Family) -> String {
    format!("{}/{}", node.pod_network.of(family), alone(family) - 6)
}
