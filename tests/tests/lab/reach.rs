//! Reachability between the machines of a lab, in each variant.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use traffic_policy_testing::capture::Capture;
use traffic_policy_testing::lab::{Family, Lab, LabBuilder};
use traffic_policy_testing::netns::Namespace;
use traffic_policy_testing::pace::{scaled, until};
use traffic_policy_testing::traffic::connections::ask_from;
use traffic_policy_testing::traffic::server::Identity;
use traffic_policy_testing::traffic::{Faults, Ledger, Outcome, Probe, Server};

const PORT: u16 = 8080;
const SOON: Duration = Duration::from_secs(3);
const NEVER: Duration = Duration::from_millis(300);

fn variants() -> [(&'static str, LabBuilder); 5] {
    [
        ("plain", Lab::builder()),
        ("overlay", Lab::builder().overlay()),
        ("two uplinks", Lab::builder().two_uplinks()),
        ("client on the switch", Lab::builder().client_on_switch()),
        ("offloads", Lab::builder().wire_offloads(true).strict_rp_filter()),
    ]
}

#[test]
fn client_reaches_nodes_but_not_pods() {
    for (variant, builder) in variants() {
        let lab = builder.build().unwrap();
        let ledger = Ledger::default();
        let on_node = Identity { pod: "host".to_owned(), node: "node-2".to_owned() };
        let node = lab.node(2);
        let _on_node = Server::start_in(node.netns(), PORT, on_node, Faults::default(), &ledger).unwrap();
        let _in_pod = Server::start(node.pod(1), PORT, &ledger).unwrap();
        for family in Family::BOTH {
            let answer =
                ask_from(lab.client().netns(), SocketAddr::new(node.address(family), PORT), scaled(SOON));
            let answer = answer.unwrap_or_else(|error| panic!("{variant}: {error:#}"));
            assert_eq!(
                (answer.pod.as_str(), answer.client.ip()),
                ("host", lab.client().address(family)),
                "{variant}"
            );
            let pod = SocketAddr::new(node.pod(1).address(family), PORT);
            for namespace in [lab.client().netns(), lab.router()] {
                assert!(
                    ask_from(namespace, pod, NEVER).is_err(),
                    "{variant}: {} has a way to pods",
                    namespace.name()
                );
            }
        }
    }
}

#[test]
fn pods_reach_each_other_across_nodes() {
    for (variant, builder) in variants() {
        let lab = builder.pods_per_node(2).build().unwrap();
        let ledger = Ledger::default();
        let servers: Vec<_> = lab.pods().map(|pod| Server::start(pod, PORT, &ledger).unwrap()).collect();
        let from = lab.node(1).pod(1);
        for to in lab.pods() {
            for family in Family::BOTH {
                let answer = ask_from(from.netns(), SocketAddr::new(to.address(family), PORT), scaled(SOON));
                let answer = answer.unwrap_or_else(|error| panic!("{variant}: {error:#}"));
                assert_eq!((answer.pod, answer.node), (to.name.clone(), to.node.clone()), "{variant}");
                assert_eq!(answer.client.ip(), from.address(family), "{variant}: translated on the way");
            }
        }
        assert_eq!(servers.len(), 6);
    }
}

#[test]
fn overlay_packets_are_encapsulated() {
    let lab = Lab::builder().nodes(2).overlay().build().unwrap();
    let capture = Capture::start(lab.router(), "node-1").unwrap();
    lab.node(1).pod(1).netns().ping(lab.node(2).pod(1).address(Family::V6), scaled(SOON)).unwrap();
    let frames = capture.finish_valid().unwrap();
    // An outer IPv4 and UDP header, to VXLAN's port.
    let is_vxlan =
        |frame: &[u8]| frame[12..14] == [8, 0] && frame[23] == 17 && frame[36..38] == 8472_u16.to_be_bytes();
    assert!(frames.iter().filter(|frame| is_vxlan(&frame.bytes)).count() >= 2, "{} frames", frames.len());
}

#[test]
fn replies_take_the_other_uplink() {
    let lab = Lab::builder().nodes(2).two_uplinks().build().unwrap();
    let first = Capture::start(lab.router(), "node-1").unwrap();
    let second = Capture::start(lab.second_router().unwrap(), "node-1").unwrap();
    for family in Family::BOTH {
        lab.client().netns().ping(lab.node(1).address(family), scaled(SOON)).unwrap();
    }
    let echo = |frame: &[u8], v4: u8, v6: u8| match frame[12..14] {
        [0x08, 0] => frame[23] == 1 && frame[34] == v4,
        [0x86, 0xdd] => frame[20] == 58 && frame[54] == v6,
        _ => false,
    };
    let count = |capture: Capture, v4, v6| {
        capture.finish().unwrap().iter().filter(|frame| echo(&frame.bytes, v4, v6)).count()
    };
    assert_eq!(count(first, 8, 128), 2, "requests by eth0");
    assert_eq!(count(second, 0, 129), 2, "replies by eth1");
}

#[test]
fn two_labs_at_once_do_not_meet() {
    let (one, two) = (Lab::builder().nodes(1).build().unwrap(), Lab::builder().nodes(1).build().unwrap());
    let ledger = Ledger::default();
    let _server = Server::start(one.node(1).pod(1), PORT, &ledger).unwrap();
    let address = SocketAddr::new(one.node(1).pod(1).address(Family::V4), PORT);
    assert_eq!(address.ip(), two.node(1).pod(1).address(Family::V4));
    ask_from(one.node(1).netns(), address, scaled(SOON)).unwrap();
    let refused = ask_from(two.node(1).netns(), address, scaled(SOON)).unwrap_err();
    assert!(format!("{refused:#}").contains("refused"), "{refused:#}");
}

#[test]
fn a_vip_follows_its_route() {
    for builder in [Lab::builder(), Lab::builder().client_on_switch()] {
        let lab = builder.nodes(2).build().unwrap();
        for (vip, prefix) in [("203.0.113.10", 32), ("2001:db8:f::10", 128)] {
            let vip: IpAddr = vip.parse().unwrap();
            let reach = |limit| lab.client().netns().ping(vip, limit);
            for node in lab.nodes() {
                node.netns().netlink(async |net| net.address("lo", vip, prefix).await).unwrap();
            }
            assert!(reach(NEVER).is_err());
            for node in lab.nodes() {
                lab.route_vip(vip, node).unwrap();
                let capture = Capture::start(lab.router(), &node.name).unwrap();
                reach(scaled(SOON)).unwrap();
                assert!(!capture.finish().unwrap().is_empty(), "{vip} does not go to {}", node.name);
            }
            lab.unroute_vip(vip).unwrap();
            assert!(reach(NEVER).is_err());
        }
    }
}

#[test]
fn a_gateway_with_another_mac_announces_it() {
    let lab = Lab::builder().nodes(1).build().unwrap();
    let node = lab.node(1);
    let gateways: [IpAddr; 2] = ["172.18.0.1".parse().unwrap(), "fd00:172:18::1".parse().unwrap()];
    let known =
        |namespace: &Namespace, gateway| namespace.netlink(async |net| net.neighbour_mac(gateway).await);
    for gateway in gateways {
        node.netns().ping(gateway, scaled(SOON)).unwrap();
    }
    let before = gateways.map(|gateway| known(node.netns(), gateway).unwrap().unwrap());
    let mac = lab.router_change_mac(true).unwrap();
    for (gateway, before) in gateways.into_iter().zip(before) {
        assert_ne!(before, mac);
        until(&format!("{gateway} is announced"), SOON, || {
            known(node.netns(), gateway).unwrap() == Some(mac)
        });
        node.netns().ping(lab.client().address(Family::V4), scaled(SOON)).unwrap();
    }
    lab.flush_neighbours().unwrap();
    assert_eq!(known(node.netns(), gateways[0]).unwrap(), None);
}

#[test]
fn an_uplink_can_vanish() {
    let lab = Lab::builder().nodes(2).build().unwrap();
    lab.remove_uplink(lab.node(1)).unwrap();
    assert!(lab.client().netns().ping(lab.node(1).address(Family::V4), NEVER).is_err());
    lab.client().netns().ping(lab.node(2).address(Family::V4), scaled(SOON)).unwrap();
}

#[test]
fn an_uplink_can_return() {
    for builder in [Lab::builder(), Lab::builder().overlay()] {
        let lab = builder.nodes(2).build().unwrap();
        let (node, pod) = (lab.node(1), lab.node(1).pod(1));
        lab.remove_uplink(node).unwrap();
        lab.restore_uplink(node).unwrap();
        for family in Family::BOTH {
            lab.client().netns().ping(node.address(family), scaled(SOON)).unwrap();
            pod.netns().ping(lab.node(2).pod(1).address(family), scaled(SOON)).unwrap();
        }
    }
}

#[test]
fn answer_refusal_and_silence_differ() {
    let lab = Lab::builder().nodes(1).build().unwrap();
    let node = lab.node(1);
    let on_node = Identity { pod: "host".to_owned(), node: node.name.clone() };
    let server =
        Server::start_in(node.netns(), PORT, on_node, Faults::default(), &Ledger::default()).unwrap();
    let from = lab.client().netns();
    let targets = Family::BOTH.map(|family| SocketAddr::new(node.address(family), PORT));
    let probes = || targets.iter().flat_map(|target| [Probe::tcp(*target), Probe::udp(*target)]);
    for probe in probes() {
        let answer = probe.source_port(4321).answer(from).unwrap();
        assert_eq!((answer.node.as_str(), answer.client.port()), ("node-1", 4321));
    }
    drop(server);
    for probe in probes() {
        let outcome = probe.from(from).unwrap();
        assert!(outcome.is_refused_at_once(), "{outcome:?}");
    }
    lab.cut(node).unwrap();
    for probe in probes() {
        assert_eq!(probe.from(from).unwrap(), Outcome::Silent);
    }
    lab.mend(node).unwrap();
    from.ping(node.address(Family::V4), scaled(SOON)).unwrap();
}
