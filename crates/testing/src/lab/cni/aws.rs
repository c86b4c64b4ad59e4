//! The VPC CNI of AWS with pods on a second network card (ENI): routing rules by the pod's address,
//! and connection marks by which replies are to leave by the card on which the request arrived.
//! IPv4 only: IPv6 pods are behind the first card there, as here.
//! <https://github.com/aws/amazon-vpc-cni-k8s/blob/master/pkg/networkutils/network.go> (rules,
//! marks, SNAT),
//! <https://github.com/aws/amazon-vpc-cni-k8s/blob/master/cmd/routed-eni-cni-plugin/driver/driver.go>
//! (a pod's device and routes)

use super::{Layout, Link, alone, both, cluster_pods, written};
use crate::family::Family;
use crate::lab::{Node, Pod};
use crate::netlink::Mac;

pub(super) struct SecondaryEni;

/// The values of `ToContainerRulePriority`, `hostRulePriority` and `FromPodRulePriority`.
const TO_POD: u32 = 512;
const MARKED: u32 = 1024;
const FROM_POD: u32 = 1536;

impl Link for SecondaryEni {
    fn host_end(&self, node: u8, pod: u8) -> (String, Option<Mac>) {
        (format!("eni{node:04x}{pod:07x}"), Some([2, 0xe0, 0, 0, node, pod]))
    }

    fn host(&self, _node: &Node, pod: &Pod, device: &str) -> String {
        let v4 = pod.addresses.v4;
        both(|family| format!("route add {}/{} dev {device}", pod.address(family), alone(family)))
            + &format!(
                "rule add pref {TO_POD} to {v4} lookup main\nrule add pref {FROM_POD} from {v4} lookup 2\n"
            )
    }

    fn pod(&self, node: &Node, pod: &Pod) -> String {
        let (v4, v6) = (pod.addresses.v4, pod.addresses.v6);
        let index = node.pods.len() as u8 + 1;
        let mac = self.host_end(node.number, index).1.map(written).unwrap_or_default();
        format!(
            "addr add {v4}/32 dev eth0\n\
             addr add {v6}/128 dev eth0 nodad\n\
             route add 169.254.1.1 dev eth0 scope link\n\
             route add default via 169.254.1.1 dev eth0\n\
             route add default via fe80::1 dev eth0\n\
             neigh add 169.254.1.1 lladdr {mac} dev eth0 nud permanent\n\
             neigh add fe80::1 lladdr {mac} dev eth0 nud permanent\n"
        )
    }
}

impl Layout for SecondaryEni {
    fn link(&self) -> &'static dyn Link {
        &Self
    }

    /// The card's own address gets no route in the main table.
    fn node(&self, node: &Node) -> String {
        let (card, gateway) = (card(node), node.pods_gateway().v4);
        format!(
            "addr add {card}/24 dev eth1 noprefixroute\n\
             route add {gateway} dev eth1 scope link table 2\n\
             route add default via {gateway} dev eth1 table 2\n\
             rule add pref {MARKED} fwmark 0x80/0x80 lookup main\n"
        )
    }

    /// IPv4: the VPC's router has the route to each pod.
    fn ways(&self, _here: &Node, there: &Node) -> String {
        let v6 = Family::V6;
        format!("route replace {} via {} dev eth0\n", there.pods(v6), there.address(v6))
    }

    /// The VPC delivers a pod's packets to the card that has its address, and accepts none from a
    /// card that has not.
    fn cloud(&self, node: &Node) -> String {
        let (gateway, mac) = (node.pods_gateway().v4, written(card_mac(node)));
        let pods = node.pods.iter().map(|pod| pod.addresses.v4).chain([card(node)]);
        let known = pods.map(|pod| format!("neigh add {pod} lladdr {mac} dev br1 nud permanent\n"));
        format!("addr add {gateway}/24 dev br1\n") + &known.collect::<String>()
    }

    fn iptables(&self, node: &Node, family: Family) -> Option<String> {
        if family == Family::V6 {
            return None;
        }
        let (pods, nodes) = (cluster_pods(family), "172.18.0.0/16");
        Some(format!(
            "*nat\n\
             :AWS-SNAT-CHAIN-0 - [0:0]\n\
             :AWS-CONNMARK-CHAIN-0 - [0:0]\n\
             -A POSTROUTING -m comment --comment \"AWS SNAT CHAIN\" -j AWS-SNAT-CHAIN-0\n\
             -A AWS-SNAT-CHAIN-0 -d {nodes} -j RETURN\n\
             -A AWS-SNAT-CHAIN-0 -d {pods} -j RETURN\n\
             -A AWS-SNAT-CHAIN-0 ! -o vlan+ -m addrtype ! --dst-type LOCAL -j SNAT --to-source {} --random-fully\n\
             -A PREROUTING -i eni+ -j AWS-CONNMARK-CHAIN-0\n\
             -A PREROUTING -j CONNMARK --restore-mark --nfmask 0x80 --ctmask 0x80\n\
             -A AWS-CONNMARK-CHAIN-0 -d {nodes} -j RETURN\n\
             -A AWS-CONNMARK-CHAIN-0 -d {pods} -j RETURN\n\
             -A AWS-CONNMARK-CHAIN-0 -j CONNMARK --set-xmark 0x80/0x80\n\
             COMMIT\n\
             *mangle\n\
             -A PREROUTING -i eth0 -m addrtype --dst-type LOCAL --limit-iface-in -j CONNMARK --set-xmark 0x80/0x80\n\
             -A PREROUTING -i eni+ -j CONNMARK --restore-mark --nfmask 0x80 --ctmask 0x80\n\
             COMMIT\n",
            node.addresses.v4
        ))
    }
}

/// The address of a node's second card.
fn card(node: &Node) -> std::net::Ipv4Addr {
    let [a, b, c, _] = node.pod_network.v4.octets();
    [a, b, c, 254].into()
}

pub(in crate::lab) fn card_mac(node: &Node) -> Mac {
    let [a, b, c, d] = card(node).octets();
    [2, 0, a, b, c, d]
}

/// The source/destination check of AWS, for the router: a card sends with its own addresses only.
pub(in crate::lab) const SOURCE_CHECK: &str = "*filter\n\
    -A FORWARD -i br1 ! -s 10.244.0.0/16 -j DROP\n\
    -A FORWARD -i br0 -s 10.244.0.0/16 -j DROP\n\
    COMMIT\n";
