//! A node with two uplinks whose requests come in by one and whose replies leave by the other.

use traffic_policy_testing::agent::{Agent, AgentBuilder};
use traffic_policy_testing::capture::{Capture, Frame};
use traffic_policy_testing::cluster::{Cluster, Protocol};
use traffic_policy_testing::lab::{Family, Lab};
use traffic_policy_testing::object::Policy;

const CLUSTER: u16 = 30080;
const LOCAL: u16 = 30081;

/// Whether it is a TCP segment or datagram from a node port.
fn is_reply(frame: &Frame) -> bool {
    let ports = match frame.bytes[12..14] {
        [0x08, 0] if [6, 17].contains(&frame.bytes[23]) => 34,
        [0x86, 0xdd] if [6, 17].contains(&frame.bytes[20]) => 54,
        _ => return false,
    };
    [CLUSTER.to_be_bytes(), LOCAL.to_be_bytes()].iter().any(|port| frame.bytes[ports..ports + 2] == *port)
}

fn two_uplinks(what: &str, adapt: impl Fn(AgentBuilder) -> AgentBuilder) {
    let cluster = Cluster::start(Lab::builder().pods(&[1, 1]).two_uplinks()).unwrap();
    let lab = &cluster.lab;
    for (name, policy, port) in [("cluster", Policy::Cluster, CLUSTER), ("local", Policy::Local, LOCAL)] {
        cluster.manifests.apply(&Cluster::node_port(name, policy, port), &cluster.backends()).unwrap();
    }
    // Only node-1 has the second device.
    let builder = Agent::builder(lab, lab.node(1)).flags(&["--node-port-addresses", "all"]);
    let first = adapt(builder).start().unwrap();
    first.wait_ready(std::time::Duration::from_secs(20)).unwrap();
    let by_first = Capture::start(lab.router(), "node-1").unwrap();
    let by_second = Capture::start(lab.second_router().unwrap(), "node-1").unwrap();
    for family in Family::BOTH {
        for protocol in Protocol::BOTH {
            let what = format!("{what} {family:?} {protocol:?}");
            let to = cluster.at(1, family, CLUSTER);
            for answer in cluster.ask_until_all(protocol, to, &["pod-1-1", "pod-2-1"]).unwrap() {
                let here = answer.node == "node-1";
                let source = if here { lab.client().address(family) } else { lab.node(1).address(family) };
                assert_eq!(answer.client.ip(), source, "{what}");
            }
            let answer = cluster.answer(protocol, cluster.at(1, family, LOCAL)).unwrap();
            assert_eq!(answer.node, "node-1", "{what}");
            // By the other address of the node, all of it takes the second uplink.
            let second = lab.node(1).second_uplink.unwrap().of(family);
            cluster.answer(protocol, (second, LOCAL).into()).unwrap();
        }
    }
    let replies = |capture: Capture| capture.finish_valid().unwrap().iter().filter(|f| is_reply(f)).count();
    assert_eq!(replies(by_first), 0, "{what}: replies by the first uplink");
    assert!(replies(by_second) > 20, "{what}: replies by the second uplink");
}

#[test]
fn by_tc() {
    two_uplinks("tc", |agent| agent.attach("tc").devices(&["eth0", "eth1"]));
}

#[test]
fn by_xdp() {
    two_uplinks("xdp", |agent| agent.attach("xdp").devices(&["eth0", "eth1"]));
}

#[test]
fn by_generic_xdp() {
    two_uplinks("xdp-generic", |agent| agent.attach("xdp-generic").devices(&["eth0", "eth1"]));
}

#[test]
fn with_found_devices() {
    two_uplinks("found", |agent| agent.attach("auto").devices(&[]));
}
