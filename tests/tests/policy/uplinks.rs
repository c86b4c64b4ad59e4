//! A node with two uplinks: requests arrive on one, and replies leave by the other, as its routes
//! demand; or, with routing rules for each of its addresses, by the one whose address they have.

use traffic_policy_testing::agent::{Agent, AgentBuilder};
use traffic_policy_testing::capture::{Capture, Frame};
use traffic_policy_testing::cluster::{Cluster, Protocol};
use traffic_policy_testing::lab::{Family, Lab};
use traffic_policy_testing::object::Policy;
use traffic_policy_testing::traffic::Probe;

const CLUSTER: u16 = 30080;
const LOCAL: u16 = 30081;

/// Whether a frame is a TCP segment or datagram from a node port.
fn is_reply(frame: &Frame) -> bool {
    let ports = match frame.bytes[12..14] {
        [0x08, 0] if [6, 17].contains(&frame.bytes[23]) => 34,
        [0x86, 0xdd] if [6, 17].contains(&frame.bytes[20]) => 54,
        _ => return false,
    };
    [CLUSTER.to_be_bytes(), LOCAL.to_be_bytes()].iter().any(|port| frame.bytes[ports..ports + 2] == *port)
}

/// The routing that decides by which uplink replies leave.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Ways {
    /// The default route: by the second uplink, whatever their source address.
    Default,
    /// A rule for each address of the node.
    BySource,
}

fn two_uplinks(what: &str, ways: Ways, adapt: impl Fn(AgentBuilder) -> AgentBuilder) {
    let cluster = Cluster::start(Lab::builder().pods(&[1, 1]).two_uplinks()).unwrap();
    let lab = &cluster.lab;
    if ways == Ways::BySource {
        lab.route_by_source().unwrap();
    }
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
            // Traffic to the node's other address uses the second uplink in both directions.
            let second = lab.node(1).second_uplink.unwrap().of(family);
            cluster.answer(protocol, (second, LOCAL).into()).unwrap();
        }
        a_flow_of_datagrams(&cluster, family);
    }
    let replies = |capture: Capture| capture.finish_valid().unwrap().into_iter().filter(is_reply);
    let by_first: Vec<_> = replies(by_first).collect();
    let by_second: Vec<_> = replies(by_second).collect();
    match ways {
        Ways::Default => {
            assert_eq!(by_first.len(), 0, "{what}: replies by the first uplink");
            assert!(by_second.len() > 20, "{what}: replies by the second uplink");
        }
        Ways::BySource => {
            assert!(by_first.len() > 20, "{what}: replies by the first uplink");
            assert!(!by_second.is_empty(), "{what}: replies by the second uplink");
            let second = lab.node(1).second_uplink.unwrap();
            let of_second = |frame: &Frame| match frame.bytes[12] {
                0x08 => frame.bytes[26..30] == second.v4.octets(),
                _ => frame.bytes[22..38] == second.v6.octets(),
            };
            assert!(by_second.iter().all(of_second), "{what}: with the address of the first uplink");
            assert!(!by_first.iter().any(of_second), "{what}: with the address of the second uplink");
            assert!(first.packets("tc-egress", "replied-redirected").unwrap() > 0, "{what}");
        }
    }
}

/// A redirected answer also passes the other uplink's program, which must not take it for a
/// datagram of the node's own: the client's next datagrams would then be treated as the node's.
fn a_flow_of_datagrams(cluster: &Cluster, family: Family) {
    for _ in 0..4 {
        let probe = Probe::udp(cluster.at(1, family, LOCAL)).source_port(4321);
        probe.answer(cluster.lab.client().netns()).unwrap();
    }
}

#[test]
fn by_tc() {
    two_uplinks("tc", Ways::Default, |agent| agent.attach("tc").devices(&["eth0", "eth1"]));
}

#[test]
fn by_xdp() {
    two_uplinks("xdp", Ways::Default, |agent| agent.attach("xdp").devices(&["eth0", "eth1"]));
}

#[test]
fn by_generic_xdp() {
    two_uplinks("xdp-generic", Ways::Default, |agent| agent.attach("xdp-generic").devices(&["eth0", "eth1"]));
}

#[test]
fn with_found_devices() {
    two_uplinks("found", Ways::Default, |agent| agent.attach("auto").devices(&[]));
}

#[test]
fn by_source_by_tc() {
    two_uplinks("by source, tc", Ways::BySource, |agent| agent.attach("tc").devices(&["eth0", "eth1"]));
}

#[test]
fn by_source_by_xdp() {
    two_uplinks("by source, xdp", Ways::BySource, |agent| agent.attach("xdp").devices(&["eth0", "eth1"]));
}
