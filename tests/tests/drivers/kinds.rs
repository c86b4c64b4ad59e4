//! Devices that are made from others: those with an Ethernet header are served, the others are refused by a sentence.

use traffic_policy_testing::netns::Namespace;

use crate::fixture::{CardTestbed, Link, START};
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
    // The kernel's VLAN devices have no XDP of their own.
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
fn tunnels_without_ethernet_header() {
    let Some([first, second]) = Wire::find("kinds::tunnels_without_ethernet_header", [0, 1]) else { return };
    let fixture = CardTestbed::build(first, second).unwrap();
    let tunnels: [(&str, &[&str], &str); 3] = [
        ("ipip", &["local", "172.18.0.1", "remote", "172.18.0.10"], "VXLAN"),
        ("sit", &["local", "172.18.0.1", "remote", "172.18.0.10"], "VXLAN"),
        ("wireguard", &[], "VXLAN over it"),
    ];
    for (kind, ends, fix) in tunnels {
        let cause = ["device tun9", "has no Ethernet header", &format!("(type {kind})")];
        let node: &Namespace = &fixture.node;
        ip(Some(node), &[&["link", "add", "tun9", "type", kind], ends].concat()).unwrap();
        ip(Some(node), &["link", "set", "tun9", "up"]).unwrap();
        let said = fixture.check("auto", &["tun9"]).unwrap();
        said.has("error", &cause, fix);
        assert_eq!(said.code, Some(1));
        let agent = fixture.agent("auto").unwrap().devices(&["tun9", "eth0"]);
        let mut agent = agent.start().unwrap();
        assert_eq!(agent.wait_ended(START).unwrap(), Some(1), "{}", agent.log());
        let sentence = agent.wait_said(&[&cause[..], &[fix]].concat(), START).unwrap();
        println!("run: {sentence}");
        // Found by a route to other nodes' pods, it is left out, and that is said.
        ip(Some(node), &["route", "add", "10.244.9.0/24", "dev", "tun9", "via", "10.244.9.1", "onlink"])
            .unwrap();
        fixture.check("auto", &[]).unwrap().has("warning", &cause, fix);
        ip(Some(node), &["link", "delete", "tun9"]).unwrap();
    }
}
