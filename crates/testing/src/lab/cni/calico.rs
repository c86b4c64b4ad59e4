//! Calico with VXLAN, and with IPIP: devices of pods without an address, a gateway for which proxy
//! ARP answers, and a route for each pod.
//! <https://github.com/projectcalico/calico/blob/master/felix/dataplane/linux/endpoint_mgr.go>
//! (`configureInterface`),
//! <https://github.com/projectcalico/calico/blob/master/felix/dataplane/linux/dataplanedefs/dataplane_defs.go>,
//! <https://github.com/projectcalico/calico/blob/master/felix/dataplane/linux/ipip_mgr.go> (tunl0,
//! routes that name the node),
//! <https://github.com/projectcalico/calico/blob/master/felix/rules/static.go> (IPIP from hosts
//! only), <https://docs.tigera.io/calico/latest/reference/resources/felixconfig> (VNI 4096, port
//! 4789), <https://docs.tigera.io/calico/latest/reference/faq> (169.254.1.1, ee:ee:ee:ee:ee:ee)

use super::{Forwarding, Layout, Link, Setting, alone, both, cluster_pods, flannel};
use crate::family::Family;
use crate::lab::{Node, Pod};
use crate::netlink::Mac;

pub(super) struct Vxlan;
pub(super) struct Ipip;

const TUNNELS: [&str; 2] = ["vxlan.calico", "vxlan-v6.calico"];
const MAC: Mac = [0xee; 6];
/// The link-local address that the kernel derives from [`MAC`].
const GATEWAY_V6: &str = "fe80::ecee:eeff:feee:eeee";

impl Layout for Vxlan {
    fn mtu(&self) -> u32 {
        1450
    }

    fn link(&self) -> &'static dyn Link {
        &Routed
    }

    fn node(&self, node: &Node) -> String {
        flannel::tunnels(node, TUNNELS, 4096, 4789) + &nowhere(node)
    }

    fn ways(&self, _here: &Node, there: &Node) -> String {
        flannel::through_tunnels(there, TUNNELS, |family| block(there, family))
    }

    fn forwarding(&self, there: &Node) -> Vec<Forwarding> {
        flannel::forwarding_entries(there, TUNNELS)
    }

    fn iptables(&self, node: &Node, family: Family) -> Option<String> {
        Some(rules(node, family, Some(TUNNELS[usize::from(family == Family::V6)]), ""))
    }
}

/// The device that the kernel's module makes in each network namespace, without a remote address:
/// each route names one. IPv4 only, so that IPv6 has plain routes.
const TUNL0: &str = "tunl0";

impl Layout for Ipip {
    fn mtu(&self) -> u32 {
        1480
    }

    fn link(&self) -> &'static dyn Link {
        &Routed
    }

    fn node(&self, node: &Node) -> String {
        let (address, mtu) = (node.pod_network.v4, self.mtu());
        format!("link set {TUNL0} mtu {mtu} up\naddr add {address}/32 dev {TUNL0}\n") + &nowhere(node)
    }

    fn ways(&self, _here: &Node, there: &Node) -> String {
        both(|family| {
            let way =
                if family == Family::V4 { format!("dev {TUNL0} onlink") } else { "dev eth0".to_owned() };
            // The protocol number is that of BIRD, which writes these routes unless Felix does.
            format!("route replace {} via {} {way} proto 12", block(there, family), there.address(family))
        })
    }

    /// Each node accepts IPIP from nodes only.
    fn iptables(&self, node: &Node, family: Family) -> Option<String> {
        if family == Family::V6 {
            return Some(rules(node, family, None, ""));
        }
        let nodes = super::network(node.addresses.network().v4.into(), family);
        let input = format!(
            ":cali-INPUT - [0:0]\n\
             -A INPUT -j cali-INPUT\n\
             -A cali-INPUT -p 4 -s {nodes} -m addrtype --dst-type LOCAL -j ACCEPT\n\
             -A cali-INPUT -p 4 -j DROP\n"
        );
        Some(rules(node, family, Some(TUNL0), &input))
    }
}

/// A veth whose end on the node has no address, and a route to the pod.
struct Routed;

impl Link for Routed {
    fn host_end(&self, node: u8, pod: u8) -> (String, Option<Mac>) {
        (format!("cali{node:04x}{pod:07x}"), Some(MAC))
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
}

/// Blackhole routes for the node's blocks: packets to addresses in them that no pod has are
/// dropped.
fn nowhere(node: &Node) -> String {
    both(|family| format!("route add blackhole {} proto 80", block(node, family)))
}

/// The rules without network policies. A packet that conntrack calls INVALID is dropped before it
/// reaches a pod, as the chain of each Calico endpoint does.
fn rules(node: &Node, family: Family, tunnel: Option<&str>, input: &str) -> String {
    let all = cluster_pods(family);
    let mut rules = String::from(
        "*nat\n\
         :cali-POSTROUTING - [0:0]\n\
         :cali-nat-outgoing - [0:0]\n\
         -A POSTROUTING -j cali-POSTROUTING\n\
         -A cali-POSTROUTING -j cali-nat-outgoing\n",
    );
    if let Some(tunnel) = tunnel {
        rules += &format!(
            "-A cali-POSTROUTING -o {tunnel} -m addrtype ! --src-type LOCAL --limit-iface-out -m addrtype --src-type LOCAL -j MASQUERADE --random-fully\n"
        );
    }
    rules += &format!(
        "-A cali-nat-outgoing -s {all} ! -d {all} -j MASQUERADE --random-fully\n\
         COMMIT\n\
         *filter\n\
         {input}\
         :cali-FORWARD - [0:0]\n\
         :cali-to-wl-dispatch - [0:0]\n\
         -A FORWARD -j cali-FORWARD\n\
         -A FORWARD -m mark --mark 0x10000/0x10000 -j ACCEPT\n\
         -A cali-FORWARD -j MARK --set-xmark 0x0/0xe0000\n\
         -A cali-FORWARD -o cali+ -j cali-to-wl-dispatch\n"
    );
    for (index, _) in (1..).zip(&node.pods) {
        let (device, _) = Routed.host_end(node.number, index);
        let chain = format!("cali-tw-{device}");
        rules += &format!(
            ":{chain} - [0:0]\n\
             -A cali-to-wl-dispatch -o {device} -g {chain}\n\
             -A {chain} -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT\n\
             -A {chain} -m conntrack --ctstate INVALID -j DROP\n\
             -A {chain} -j MARK --set-xmark 0x10000/0x10000\n"
        );
    }
    rules + "COMMIT\n"
}

/// The block of addresses of a node: 64 of each family.
fn block(node: &Node, family: Family) -> String {
    format!("{}/{}", node.pod_network.of(family), alone(family) - 6)
}
