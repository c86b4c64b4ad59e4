//! Devices without Ethernet, in both directions: requests arrive on one, and other nodes' pods are
//! behind one.

mod testbed;

use std::net::{IpAddr, SocketAddr};
use std::process::Command;
use std::time::Duration;

use traffic_policy_testing::agent::Agent;
use traffic_policy_testing::cluster::Protocol;
use traffic_policy_testing::lab::{Addresses, Family};
use traffic_policy_testing::netns::Namespace;
use traffic_policy_testing::rows;
use traffic_policy_testing::traffic::transfer::transfer;

use self::testbed::{Client, POD_FAR, POD_HERE, Port, Tunnels};
use crate::fragments::echo;

const START: Duration = Duration::from_secs(20);
const BYTES: u64 = 500_000;

fn start(tunnels: &Tunnels, attach: &str, devices: &[&str]) -> Agent {
    let agent = tunnels.agent(attach, devices).start().unwrap();
    agent.wait_ready(START).unwrap();
    agent
}

fn transfers(tunnels: &Tunnels) {
    for client in Client::BOTH {
        for family in Family::BOTH {
            for port in [Port::Here, Port::Far] {
                // The path MTU to the node's address, learned through one port, would be known for
                // the other.
                flush(tunnels.client(client), family);
                let done = transfer(tunnels.client(client), Tunnels::at(family, port), BYTES);
                done.unwrap_or_else(|error| panic!("{client:?} {family:?} {port:?}: {error:#}"));
            }
        }
    }
}

fn flush(namespace: &Namespace, family: Family) {
    let mut command = Command::new("ip");
    command.args([if family == Family::V4 { "-4" } else { "-6" }, "route", "flush", "cache"]);
    let output = namespace.output(command).unwrap();
    assert!(output.status.success(), "{output:?}");
}

fn packets(agent: &Agent, outcome: &str) -> u64 {
    ["xdp", "tc-ingress", "tc-egress"].iter().map(|hook| agent.packets(hook, outcome).unwrap()).sum()
}

fn nothing_failed(agent: &Agent) {
    for outcome in
        ["dropped-internal-error", "dropped-mtu-exceeded", "dropped-no-route", "passed-missed-tail-call"]
    {
        assert_eq!(packets(agent, outcome), 0, "{outcome}");
    }
}

fn is_attached(agent: &Agent, device: &str, mode: &str) -> bool {
    let (device, mode) = (format!("device=\"{device}\""), format!("mode={mode}"));
    agent.log().lines().any(|line| {
        line.contains("attached") && line.contains(&device) && line.split(' ').any(|word| word == mode)
    })
}

/// Sets the MTU of the route from `router` to one address to 1300 bytes.
fn narrow(router: &Namespace, address: IpAddr, device: &str) {
    let (family, prefix, mtu): (_, _, &[&str]) =
        if address.is_ipv4() { ("-4", 32, &["mtu", "lock", "1300"]) } else { ("-6", 128, &["mtu", "1300"]) };
    let mut command = Command::new("ip");
    command.args([family, "route", "add", &format!("{address}/{prefix}"), "dev", device]).args(mtu);
    let output = router.output(command).unwrap();
    assert!(output.status.success(), "{output:?}");
}

#[test]
fn requests_and_transfers_on_found_devices() {
    let tunnels = Tunnels::build(1500).unwrap();
    let agent = start(&tunnels, "auto", &[]);
    for device in ["tun0", "tun1", "eth0"] {
        assert!(is_attached(&agent, device, "tc"), "{device}: {}", agent.log());
    }
    tunnels.matrix().unwrap_or_else(|error| panic!("{error:#}\n{}", agent.log()));
    transfers(&tunnels);
    nothing_failed(&agent);
    // Another agent takes over the attached programs.
    drop(agent);
    let agent = start(&tunnels, "auto", &[]);
    tunnels.matrix().unwrap();
    nothing_failed(&agent);
}

/// XDP on the wire, TC on the tunnels: XDP sees no frames there.
#[test]
fn requests_and_transfers_by_generic_xdp_beside_tunnels() {
    let tunnels = Tunnels::build(1500).unwrap();
    // The other end of a veth would leave checksums to a card.
    let mut command = Command::new("ethtool");
    command.args(["-K", "eth0", "tx", "off"]);
    assert!(tunnels.client(Client::Wire).output(command).unwrap().status.success());
    let agent = start(&tunnels, "xdp-generic", &[]);
    assert!(is_attached(&agent, "tun0", "tc") && is_attached(&agent, "tun1", "tc"), "{}", agent.log());
    assert!(is_attached(&agent, "eth0", "xdp-generic"), "{}", agent.log());
    tunnels.matrix().unwrap_or_else(|error| panic!("{error:#}\n{}", agent.log()));
    transfers(&tunnels);
    nothing_failed(&agent);
}

#[test]
fn a_named_tunnel_refuses_xdp_and_says_what_to_do() {
    let tunnels = Tunnels::build(1500).unwrap();
    for mode in ["xdp", "xdp-generic"] {
        let mut agent = tunnels.agent(mode, &["tun1"]).start().unwrap();
        assert_eq!(agent.wait_ended(START).unwrap(), Some(1), "{}", agent.log());
        let cause = ["device tun1 has no Ethernet header (type tun)", "--attach auto"];
        agent.wait_said(&cause, START).unwrap();
    }
}

/// The node's end of the tunnel has a smaller MTU than the wire: every sender gets the error.
#[test]
fn too_long_for_the_tunnel() {
    let tunnels = Tunnels::build(1400).unwrap();
    let agent = start(&tunnels, "auto", &[]);
    transfers(&tunnels);
    // Each client got the error at least once in each family.
    let told = packets(&agent, "rejected-mtu-exceeded");
    assert!(told >= 4, "{told} senders were told");
    nothing_failed(&agent);
}

/// A router with a smaller MTU is behind the tunnel, and another one before the pod of this node.
#[test]
fn errors_of_routers_come_through() {
    let tunnels = Tunnels::build(1500).unwrap();
    for family in Family::BOTH {
        narrow(&tunnels.far, POD_FAR.of(family), "pod0");
        narrow(&tunnels.node, POD_HERE.of(family), "pod0");
    }
    let agent = start(&tunnels, "auto", &[]);
    transfers(&tunnels);
    // The errors arrive on the tunnel, and leave towards the tunnel's client.
    assert!(agent.packets("tc-ingress", "replied-icmp-error").unwrap() >= 4, "{}", agent.log());
    assert!(agent.packets("tc-egress", "replied-local-icmp-error").unwrap() >= 4, "{}", agent.log());
    nothing_failed(&agent);
}

#[test]
fn fragments_both_ways() {
    let tunnels = Tunnels::build(1500).unwrap();
    let agent = start(&tunnels, "auto", &[]);
    for client in Client::BOTH {
        for family in Family::BOTH {
            for (port, pod) in [(Port::Here, "pod-here"), (Port::Far, "pod-far")] {
                for length in [1473, 4096, 20_000] {
                    let answer = echo(tunnels.client(client), Tunnels::at(family, port), length);
                    let seen = Tunnels::seen(client, family, port);
                    assert_eq!((answer.pod.as_str(), answer.client.ip()), (pod, seen), "{client:?} {length}");
                }
            }
        }
    }
    nothing_failed(&agent);
}

const VIPS: Addresses = Addresses::new([203, 0, 113, 9], [0x2001, 0xdb8, 5, 0, 0, 0, 0, 9]);
const VIP_PORT: u16 = 80;

/// The other node is in front of this one's endpoint, and a pod there is the client: outer packets
/// and replies travel by the tunnel between the nodes.
fn forwarded_between_nodes(forwarding: &str, dispatch: &str) {
    let tunnels = Tunnels::build(1500).unwrap();
    tunnels.forward_between_nodes(VIPS).unwrap();
    // The client is a pod of the node in front, at a device that is attached as one to the outside.
    let flags = ["--forwarding", forwarding, "--dispatch", dispatch, "--source-check", "off"];
    let [home, front] = [tunnels.agent("tc", &["tun1"]), tunnels.agent_of_far()].map(|builder| {
        let agent = builder.flags(&flags).start().unwrap();
        agent.wait_ready(START).unwrap();
        agent
    });
    let client: &Namespace = &tunnels.pod_far;
    for family in Family::BOTH {
        let to = SocketAddr::new(VIPS.of(family), VIP_PORT);
        for protocol in Protocol::BOTH {
            for _ in 0..5 {
                let answer = protocol.probe(to).limit(START).answer(client).unwrap_or_else(|error| {
                    let counted =
                        [&front, &home].map(|agent| agent.json(&["status"]).unwrap()["counters"].to_string());
                    panic!("{forwarding} {protocol:?} {to}: {error:#}\n{counted:#?}")
                });
                assert_eq!((answer.pod.as_str(), answer.client.ip()), ("pod-here", POD_FAR.of(family)));
            }
        }
        // More than 100 aggregates of 64 KiB in both families: each counts once.
        transfer(client, to, 8 * BYTES).unwrap();
    }
    let back = if forwarding == "tunnel" { "replied-to-front" } else { "replied-local" };
    assert!(packets(&front, "forwarded-direct") > 100 && packets(&front, "forwarded") == 0);
    assert!(packets(&home, "delivered") > 100 && packets(&home, back) > 100, "{}", home.log());
    assert_eq!(packets(&front, "replied-opened") > 100, forwarding == "tunnel");
    for agent in [&home, &front] {
        nothing_failed(agent);
    }
}

rows! {
    fn what_was_sent_directly_is_opened_behind_a_tunnel() = forwarded_between_nodes("direct", "ipip");
    fn what_was_sent_within_udp_is_opened_behind_a_tunnel() = forwarded_between_nodes("direct", "udp");
    fn replies_go_back_within_packets_by_a_tunnel() = forwarded_between_nodes("tunnel", "ipip");
    fn replies_go_back_within_udp_by_a_tunnel() = forwarded_between_nodes("tunnel", "udp");
}
