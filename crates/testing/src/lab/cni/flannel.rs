//! flannel with its back ends vxlan, host-gw and wireguard. Its CNI plugin delegates to `bridge`,
//! with hairpin and without `ipMasq`: flanneld masquerades (`--ip-masq`).
//! <https://github.com/flannel-io/flannel/blob/master/pkg/backend/vxlan/vxlan.go>,
//! <https://github.com/flannel-io/flannel/blob/master/pkg/backend/vxlan/vxlan_network.go>,
//! <https://github.com/flannel-io/flannel/blob/master/pkg/backend/wireguard/wireguard.go>,
//! <https://github.com/flannel-io/flannel/blob/master/pkg/backend/wireguard/wireguard_network.go>,
//! <https://github.com/flannel-io/flannel/blob/master/pkg/trafficmngr/iptables/iptables.go>

use std::net::SocketAddr;

use anyhow::Result;

use super::{Forwarding, Layout, Link, both, bridge, cluster_pods, written};
use crate::family::Family;
use crate::lab::Node;
use crate::netlink::Mac;
use crate::wireguard::{self, Peer};

const TUNNELS: [&str; 2] = ["flannel.1", "flannel-v6.1"];

pub(super) struct Vxlan;
pub(super) struct HostGateway;
pub(super) struct Wireguard;

impl Layout for Vxlan {
    /// The MTU with an outer IPv4 header: with IPv6 the tunnel takes 20 bytes less, and reports it
    /// by ICMP.
    fn mtu(&self) -> u32 {
        1450
    }

    fn link(&self) -> &'static dyn Link {
        &bridge::Port
    }

    fn node(&self, node: &Node) -> String {
        bridge::device(node, self.mtu()) + &tunnels(node, TUNNELS, 1, 8472)
    }

    fn ways(&self, _here: &Node, there: &Node) -> String {
        through_tunnels(there, TUNNELS, |family| there.pods(family))
    }

    fn forwarding(&self, there: &Node) -> Vec<Forwarding> {
        forwarding_entries(there, TUNNELS)
    }

    fn iptables(&self, node: &Node, family: Family) -> Option<String> {
        Some(rules(node, family))
    }
}

impl Layout for HostGateway {
    fn link(&self) -> &'static dyn Link {
        &bridge::Port
    }

    fn node(&self, node: &Node) -> String {
        bridge::device(node, self.mtu())
    }

    fn ways(&self, _here: &Node, there: &Node) -> String {
        bridge::by_node(there)
    }

    fn iptables(&self, node: &Node, family: Family) -> Option<String> {
        Some(rules(node, family))
    }
}

/// The name and port of the device of each family: mode `separate`, which is flannel's own default.
const WIREGUARD: [(Family, &str, u16); 2] =
    [(Family::V4, "flannel-wg", 51820), (Family::V6, "flannel-wg-v6", 51821)];

impl Layout for Wireguard {
    /// 80 bytes less, the overhead with IPv6.
    fn mtu(&self) -> u32 {
        1420
    }

    fn link(&self) -> &'static dyn Link {
        &bridge::Port
    }

    /// One route for all nodes' pods: the device knows the peer of each.
    fn node(&self, node: &Node) -> String {
        let mtu = self.mtu();
        let devices = WIREGUARD.map(|(family, device, _)| {
            let (first, alone, all) =
                (node.pod_network.of(family), super::alone(family), cluster_pods(family));
            let options = if family == Family::V6 { " nodad" } else { "" };
            let scope = if family == Family::V4 { " scope link" } else { "" };
            format!(
                "link add {device} mtu {mtu} type wireguard\n\
                 addr add {first}/{alone} dev {device}{options}\n\
                 link set {device} up\n\
                 route add {all} dev {device}{scope}\n"
            )
        });
        bridge::device(node, mtu) + &devices.concat()
    }

    fn ways(&self, _here: &Node, _there: &Node) -> String {
        String::new()
    }

    /// Both devices have the same key.
    fn keys(&self, node: &Node) -> Result<()> {
        let start = |(_, device, port)| wireguard::start(node.netns(), device, [node.number; 32], port);
        WIREGUARD.into_iter().try_for_each(start)
    }

    fn peers(&self, here: &Node, there: &Node) -> Result<()> {
        WIREGUARD.into_iter().try_for_each(|(family, device, port)| {
            let peer = Peer {
                key: wireguard::public_key(there.netns(), device)?,
                endpoint: SocketAddr::new(there.address(family), port),
                allowed: vec![(there.pod_network.of(family), family.prefix())],
            };
            wireguard::add_peer(here.netns(), device, &peer)
        })
    }

    fn iptables(&self, node: &Node, family: Family) -> Option<String> {
        Some(rules(node, family))
    }
}

/// A VXLAN device for each family, whose MTU the kernel sets: 50 and 70 bytes less than that of
/// eth0. Its address is the first of the pods' network.
pub(super) fn tunnels(node: &Node, names: [&str; 2], id: u32, port: u16) -> String {
    let device = |family| names[usize::from(family == Family::V6)];
    let mac = |family| written(mac_of(node, family));
    both(|family| {
        format!(
            "link add {} address {} type vxlan id {id} dev eth0 local {} dstport {port} nolearning",
            device(family),
            mac(family),
            node.address(family)
        )
    }) + &both(|family| {
        let (first, alone) = (node.pod_network.of(family), super::alone(family));
        let options = if family == Family::V6 { " nodad" } else { "" };
        format!("addr add {first}/{alone} dev {}{options}", device(family))
    }) + &both(|family| format!("link set {} up", device(family)))
}

/// The neighbour, the forwarding entry and the route of another node, all static: there is no ARP
/// in the tunnel.
pub(super) fn through_tunnels(there: &Node, names: [&str; 2], pods: impl Fn(Family) -> String) -> String {
    let device = |family| names[usize::from(family == Family::V6)];
    let gateway = |family| there.pod_network.of(family);
    both(|family| {
        let mac = written(mac_of(there, family));
        format!("neigh replace {} lladdr {mac} dev {} nud permanent", gateway(family), device(family))
    }) + &both(|family| {
        format!("route replace {} via {} dev {} onlink", pods(family), gateway(family), device(family))
    })
}

/// The forwarding entries of another node's tunnels.
pub(super) fn forwarding_entries(there: &Node, names: [&'static str; 2]) -> Vec<Forwarding> {
    let entry = |(family, device)| (device, mac_of(there, family), there.address(family));
    Family::BOTH.into_iter().zip(names).map(entry).collect()
}

fn mac_of(node: &Node, family: Family) -> Mac {
    let mut mac = node.pod_network.mac();
    mac[1] = if family == Family::V4 { 4 } else { 6 };
    mac
}

/// Docker leaves FORWARD with the policy DROP, which is why flanneld adds rules that accept its
/// network.
fn rules(node: &Node, family: Family) -> String {
    let (own, all) = (node.pods(family), cluster_pods(family));
    let multicast = if family == Family::V4 { "224.0.0.0/4" } else { "ff00::/8" };
    format!(
        "*nat\n\
         :FLANNEL-POSTRTG - [0:0]\n\
         -A POSTROUTING -m comment --comment \"flanneld masq\" -j FLANNEL-POSTRTG\n\
         -A FLANNEL-POSTRTG -m mark --mark 0x4000/0x4000 -j RETURN\n\
         -A FLANNEL-POSTRTG -s {own} -d {all} -j RETURN\n\
         -A FLANNEL-POSTRTG -s {all} -d {own} -j RETURN\n\
         -A FLANNEL-POSTRTG ! -s {all} -d {own} -j RETURN\n\
         -A FLANNEL-POSTRTG -s {all} ! -d {multicast} -j MASQUERADE --random-fully\n\
         -A FLANNEL-POSTRTG ! -s {all} -d {all} -j MASQUERADE --random-fully\n\
         COMMIT\n\
         *filter\n\
         :FORWARD DROP [0:0]\n\
         :FLANNEL-FWD - [0:0]\n\
         -A FORWARD -m comment --comment \"flanneld forward\" -j FLANNEL-FWD\n\
         -A FLANNEL-FWD -s {all} -j ACCEPT\n\
         -A FLANNEL-FWD -d {all} -j ACCEPT\n\
         COMMIT\n"
    )
}
