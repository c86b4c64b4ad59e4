//! `loadBalancerSourceRanges` for callers that are not bound to an address yet: they probably get
//! the node's, or one of the pods'.

use std::net::{IpAddr, SocketAddr};

use nix::libc;
use serde_json::json;
use traffic_policy_testing::cluster::TARGET;
use traffic_policy_testing::lab::Family;
use traffic_policy_testing::object::{Port, Service};

use crate::fixture::{NODE_PORT, PORT, SocketCluster};
use traffic_policy_tests::caller::{Caller, Kind};

fn vip(number: u8, family: Family) -> IpAddr {
    match family {
        Family::V4 => [203, 0, 113, number].into(),
        Family::V6 => [0x2001, 0xdb8, 0xf, 0, 0, 0, 0, number.into()].into(),
    }
}

fn restricted(number: u8, ranges: &[&str]) -> Service {
    Service::new(&format!("restricted-{number}"))
        .port(Port::tcp(PORT, TARGET).node_port(NODE_PORT + u16::from(number)))
        .port(Port::udp(PORT, TARGET).node_port(NODE_PORT + u16::from(number)))
        .vip(vip(number, Family::V4))
        .vip(vip(number, Family::V6))
        .spec("loadBalancerSourceRanges", json!(ranges))
}

const PODS: u8 = 20;
const NODE: u8 = 21;
const NOBODY: u8 = 22;
const ONE_POD: u8 = 23;

/// Whether TCP, connected UDP and unconnected UDP are admitted; they must agree.
fn may(caller: &Caller, kind: Kind, number: u8, bound: Option<IpAddr>) -> bool {
    let to = kind.written(SocketAddr::new(vip(number, kind.family()), PORT));
    let prepared = |socket: traffic_policy_tests::caller::Socket| {
        if let Some(ip) = bound {
            socket.bind(kind.written(SocketAddr::new(ip, 0)));
        }
        socket
    };
    let tcp = prepared(caller.tcp(kind)).connect(to);
    let connected = prepared(caller.udp(kind)).connect(to);
    let sent = prepared(caller.udp(kind)).exchange(to);
    let what = format!("{kind:?} {to} from {bound:?}: {tcp:?} {connected:?} {sent:?}");
    if tcp.is_ok() {
        assert!(connected.is_ok() && sent.is_ok(), "{what}");
        return true;
    }
    let number = |error: Option<std::io::Error>| error.and_then(|error| error.raw_os_error());
    let errors = [number(tcp.err()), number(connected.err()), number(sent.err())];
    assert_eq!(errors, [Some(libc::ETIMEDOUT), Some(libc::EPERM), Some(libc::EPERM)], "{what}");
    false
}

#[test]
fn by_the_address_that_a_caller_will_have() {
    let fixture = SocketCluster::start(&[2, 1], |cluster| {
        let lab = &cluster.lab;
        let range = |addresses: &traffic_policy_testing::lab::Addresses, lengths: [u8; 2]| {
            [format!("{}/{}", addresses.v4, lengths[0]), format!("{}/{}", addresses.v6, lengths[1])]
        };
        let pods = range(&lab.node(1).pod_network, [24, 64]);
        let node = range(&lab.node(1).addresses, [32, 128]);
        let pod = range(&lab.node(1).pod(1).addresses, [32, 128]);
        for (number, ranges) in [(PODS, pods), (NODE, node), (ONE_POD, pod)] {
            let ranges = ranges.each_ref().map(String::as_str);
            cluster.manifests.apply(&restricted(number, &ranges), &cluster.backends()).unwrap();
        }
        let nobody = restricted(NOBODY, &["198.51.100.0/24", "2001:db8:dead::/48"]);
        cluster.manifests.apply(&nobody, &cluster.backends()).unwrap();
    });
    let (pod, node) = (fixture.in_pod(1, 1), fixture.on_node(1));
    for kind in Kind::ALL {
        let family = kind.family();
        assert!(may(&pod, kind, PODS, None) && !may(&node, kind, PODS, None));
        assert!(!may(&pod, kind, NODE, None) && may(&node, kind, NODE, None));
        assert!(!may(&pod, kind, NOBODY, None) && !may(&node, kind, NOBODY, None));
        // A pod's own address is known once its socket is bound to it.
        let own = fixture.pod_address(1, 1, family);
        assert!(!may(&pod, kind, ONE_POD, None) && may(&pod, kind, ONE_POD, Some(own)));
        assert!(!may(&pod, kind, NODE, Some(own)) && may(&pod, kind, PODS, Some(own)));
        // The node's end of the pods' network is in their range.
        let bridge = match family {
            Family::V4 => IpAddr::from(
                fixture.cluster.lab.node(1).pod_network.v4.to_bits().wrapping_add(1).to_be_bytes(),
            ),
            Family::V6 => (fixture.cluster.lab.node(1).pod_network.v6.to_bits() | 1).to_be_bytes().into(),
        };
        assert!(!may(&node, kind, NODE, Some(bridge)) && may(&node, kind, PODS, Some(bridge)));
        // Node ports are not restricted.
        let to = fixture.cluster.at(1, family, NODE_PORT + u16::from(NOBODY));
        pod.ask(kind, to).unwrap();
    }
    assert!(fixture.calls(1, "dropped-source-range") > 0);
}
