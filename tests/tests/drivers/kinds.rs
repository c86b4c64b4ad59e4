//! Virtual devices: those with an Ethernet header, and tunnels without one.

use std::net::{IpAddr, SocketAddr};

use traffic_policy_testing::cluster::Protocol;
use traffic_policy_testing::lab::{Addresses, Family};
use traffic_policy_testing::netns::Namespace;
use traffic_policy_testing::rows;
use traffic_policy_testing::traffic::transfer::transfer;
use traffic_policy_testing::wireguard::{self, Peer};

use crate::fixture::{CardTestbed, Link, Place, START};
use crate::flows::{LEAST, nothing_failed, served};
use crate::wires::{Wire, ip};

const BYTES: u64 = 1_000_000;

fn works(fixture: &CardTestbed, attach: &str, hook: &str) {
    let agent = fixture.agent(attach).unwrap().start().unwrap();
    agent.wait_ready(START).unwrap();
    fixture.requests().unwrap_or_else(|error| panic!("{attach}: {error:#}\n{}", agent.log()));
    fixture.transfers(BYTES).unwrap_or_else(|error| panic!("{attach}: {error:#}"));
    nothing_failed(&agent).unwrap();
    let packets = served(&agent, hook).unwrap();
    assert!(packets > LEAST, "{attach}: only {packets} packets by {hook}");
}

#[test]
fn vlan() {
    let Some([first, second]) = Wire::find("kinds::vlan", [0, 1]) else { return };
    let fixture = CardTestbed::build_with(first, second, Link::Vlan).unwrap();
    works(&fixture, "auto", "tc-ingress");
    works(&fixture, "xdp-generic", "xdp");
    // The kernel's VLAN devices have no native XDP.
    let mut agent = fixture.agent("xdp").unwrap().start().unwrap();
    assert_eq!(agent.wait_ended(START).unwrap(), Some(1), "{}", agent.log());
    let said = agent.wait_said(&["the driver of eth0.5", "has no XDP", "--attach tc"], START).unwrap();
    println!("run: {said}");
}

#[test]
fn bond() {
    let Some([first, second, third]) = Wire::find("kinds::bond", [0, 1, 2]) else { return };
    let fixture = CardTestbed::build_with(first, second, Link::Bond(third)).unwrap();
    works(&fixture, "auto", "tc-ingress");
    works(&fixture, "xdp", "xdp");
    // The other card takes over.
    ip(Some(&fixture.node), &["link", "set", "eth0", "down"]).unwrap();
    fixture.requests().unwrap();
    ip(Some(&fixture.node), &["link", "set", "eth0", "up"]).unwrap();
}

#[test]
fn ipip_with_one_other_end() {
    serves(&Tunnel { kind: "ipip", name: "ipip_with_one_other_end", families: &[Family::V4], one_end: true });
}

/// A tunnel like that of Calico: the route determines the remote address.
#[test]
fn ipip_with_many_other_ends() {
    serves(&Tunnel {
        kind: "ipip",
        name: "ipip_with_many_other_ends",
        families: &[Family::V4],
        one_end: false,
    });
}

rows! {
    fn sit() = serves(&Tunnel { kind: "sit", name: "sit", families: &[Family::V6], one_end: true });
    fn gre() = serves(&Tunnel { kind: "gre", name: "gre", families: &Family::BOTH, one_end: true });
    fn wireguard() =
        serves(&Tunnel { kind: "wireguard", name: "wireguard", families: &Family::BOTH, one_end: true });
}

/// The device adds its own header before TC sees the packet.
#[test]
fn gre_with_many_other_ends_is_refused() {
    let Some([first, second]) = Wire::find("kinds::gre_with_many_other_ends_is_refused", [0, 1]) else {
        return;
    };
    let fixture = CardTestbed::build(first, second).unwrap();
    ip(Some(&fixture.node), &["link", "add", "tun9", "type", "gre", "local", "172.18.0.1", "key", "9"])
        .unwrap();
    ip(Some(&fixture.node), &["link", "set", "tun9", "up"]).unwrap();
    let (cause, fix) = (["device tun9 (type gre)", "neither"], "one other end");
    let checked = fixture.check("auto", &["tun9"]).unwrap();
    checked.has("error", &cause, fix);
    assert_eq!(checked.code, Some(1));
    let mut agent = fixture.agent("auto").unwrap().devices(&["tun9", "eth0"]).start().unwrap();
    assert_eq!(agent.wait_ended(START).unwrap(), Some(1), "{}", agent.log());
    let sentence = agent.wait_said(&[&cause[..], &[fix]].concat(), START).unwrap();
    println!("run: {sentence}");
    // A device that is found by a route to other nodes' pods is left out, which is reported.
    ip(
        Some(&fixture.node),
        &["route", "add", "10.244.9.0/24", "dev", "tun9", "via", "172.18.0.10", "onlink"],
    )
    .unwrap();
    fixture.check("auto", &[]).unwrap().has("warning", &cause, fix);
}

/// A tunnel over the first wire between the node and `near`, which stands for another node with a
/// pod.
struct Tunnel {
    kind: &'static str,
    /// The name of the test.
    name: &'static str,
    families: &'static [Family],
    /// Whether the tunnel has a fixed remote address, and needs no route to find it.
    one_end: bool,
}

const NODE_END: Addresses = Addresses::new([10, 99, 0, 1], [0xfd00, 0x99, 0, 0, 0, 0, 0, 1]);
/// The address of `near` on the tunnel, and of its pod: a server answers datagrams from the address
/// that its routes select.
const BEHIND: Addresses = Addresses::new([10, 244, 9, 10], [0xfd00, 0x10, 0x244, 9, 0, 0, 0, 0x10]);
/// The outer addresses.
const OUTER: [&str; 2] = ["172.18.0.1", "172.18.0.10"];
const BEHIND_PORT: u16 = 30090;

impl Tunnel {
    fn build(&self, node: &Namespace, near: &Namespace) {
        if self.kind == "wireguard" {
            join_by_wireguard([node, near]);
        }
        let ends = [(node, OUTER, NODE_END, BEHIND), (near, [OUTER[1], OUTER[0]], BEHIND, NODE_END)];
        for (namespace, [local, remote], own, other) in ends {
            let run =
                |arguments: &str| ip(Some(namespace), &arguments.split(' ').collect::<Vec<_>>()).unwrap();
            if self.kind != "wireguard" {
                let to = if self.one_end { format!(" remote {remote}") } else { String::new() };
                run(&format!("link add tun9 type {} local {local}{to}", self.kind));
                run("link set tun9 up");
            }
            let gateway = if self.one_end { String::new() } else { format!(" via {remote} onlink") };
            for family in self.families {
                let (own, other) = (own.of(*family), other.of(*family));
                let length = if *family == Family::V4 { 32 } else { 128 };
                run(&format!("addr add {own}/{length} dev tun9"));
                run(&format!("route add {other}/{length} dev tun9{gateway}"));
            }
        }
    }
}

/// Connects both ends; each has all addresses behind the other as allowed.
fn join_by_wireguard(ends: [&Namespace; 2]) {
    const PORT: u16 = 51820;
    for (number, end) in (1..).zip(ends) {
        ip(Some(end), &["link", "add", "tun9", "type", "wireguard"]).unwrap();
        wireguard::start(end, "tun9", [number; 32], PORT).unwrap();
    }
    for (end, other, address) in [(ends[0], ends[1], OUTER[1]), (ends[1], ends[0], OUTER[0])] {
        let key = wireguard::public_key(other, "tun9").unwrap();
        let endpoint = SocketAddr::new(address.parse().unwrap(), PORT);
        let allowed = vec![([0; 4].into(), 0), ([0u16; 8].into(), 0)];
        wireguard::add_peer(end, "tun9", &Peer { key, endpoint, allowed }).unwrap();
        ip(Some(end), &["link", "set", "tun9", "up"]).unwrap();
    }
}

/// Sends requests, and transfers a megabyte each way, to a pod behind the tunnel, and from a client
/// behind it.
fn serves(tunnel: &Tunnel) {
    let Some([first, second]) = Wire::find(&format!("kinds::{}", tunnel.name), [0, 1]) else { return };
    let fixture = CardTestbed::build(first, second).unwrap();
    tunnel.build(&fixture.node, &fixture.near);
    fixture.serve_behind("behind", BEHIND_PORT, &BEHIND).unwrap();
    let checked = fixture.check("auto", &["eth0", "eth1", "tun9"]).unwrap();
    checked.has("ok", &[&format!("tun9 ({})", tunnel.kind), "no Ethernet header: TC takes its packets"], "");
    let agent = fixture.agent("auto").unwrap().devices(&["eth0", "eth1", "tun9"]);
    let agent = agent.flags(&["--node-port-addresses", "all"]).start().unwrap();
    agent.wait_ready(START).unwrap();
    for family in tunnel.families {
        let node = |port| SocketAddr::new(NODE_END.of(*family), port);
        let outside = SocketAddr::new(fixture.at(Place::ThisNode, *family).ip(), BEHIND_PORT);
        let far = fixture.seen(Place::OtherCard, *family);
        let cases: [(&Namespace, SocketAddr, &str, IpAddr); 3] = [
            (&fixture.client, outside, "near", NODE_END.of(*family)),
            (&fixture.near, node(Place::ThisNode.node_port()), "pod", BEHIND.of(*family)),
            (&fixture.near, node(Place::OtherCard.node_port()), "far", far),
        ];
        for (from, to, pod, seen) in cases {
            for protocol in Protocol::BOTH {
                let asked = protocol.probe(to).answer(from);
                let answer =
                    asked.unwrap_or_else(|error| panic!("{protocol:?} {to}: {error:#}\n{}", agent.log()));
                assert_eq!((answer.pod.as_str(), answer.client.ip()), (pod, seen), "{protocol:?} {to}");
            }
            let done = transfer(from, to, BYTES).unwrap_or_else(|error| panic!("{to}: {error:#}"));
            println!("{} {to}: {done:?}", tunnel.kind);
        }
    }
    nothing_failed(&agent).unwrap();
    // A tunnel has no XDP.
    drop(agent);
    let mut agent = fixture.agent("xdp").unwrap().devices(&["tun9"]).start().unwrap();
    assert_eq!(agent.wait_ended(START).unwrap(), Some(1), "{}", agent.log());
    let cause = format!("(type {})", tunnel.kind);
    agent.wait_said(&["device tun9 has no Ethernet header", &cause, "--attach auto"], START).unwrap();
}
