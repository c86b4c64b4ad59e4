//! Both policies, both families, both protocols, for each way to attach, with endpoints on none, one and two nodes.

use std::net::SocketAddr;

use traffic_policy_tests::agent::Agent;
use traffic_policy_tests::lab::{Family, Lab};
use traffic_policy_tests::object::{Backend, Manifests, Policy, Port, Service};
use traffic_policy_tests::traffic::{Ledger, Outcome, Probe, Server};

const CLUSTER: u16 = 30080;
const LOCAL: u16 = 30081;

fn matrix(attach: &str, wire_offloads: bool) {
    let lab = Lab::builder().pods(&[1, 2, 0]).wire_offloads(wire_offloads).build().unwrap();
    let ledger = Ledger::default();
    let _servers: Vec<_> = lab.pods().map(|pod| Server::start(pod, 8080, &ledger).unwrap()).collect();
    let backends: Vec<_> = lab.pods().map(Backend::of).collect();
    let manifests = Manifests::of(&lab).unwrap();
    for (name, policy, port) in [("cluster", Policy::Cluster, CLUSTER), ("local", Policy::Local, LOCAL)] {
        let service = Service::new(name)
            .policy(policy)
            .port(Port::tcp(80, 8080).node_port(port))
            .port(Port::udp(80, 8080).node_port(port));
        manifests.apply(&service, &backends).unwrap();
    }
    let _agents = Agent::start_all(&lab, |agent| agent.attach(attach)).unwrap();
    for family in [Family::V4, Family::V6] {
        for node in lab.nodes() {
            for udp in [false, true] {
                let probe = |port| {
                    let to = SocketAddr::new(node.address(family), port);
                    let probe = if udp { Probe::udp(to) } else { Probe::tcp(to) };
                    probe.from(lab.client().netns()).unwrap()
                };
                let what = format!("{attach} {family:?} udp={udp} {}", node.name);
                for _ in 0..6 {
                    let outcome = probe(CLUSTER);
                    assert!(matches!(outcome, Outcome::Answered(_)), "{what} Cluster: {outcome:?}");
                }
                for _ in 0..4 {
                    let outcome = probe(LOCAL);
                    if node.name == "node-3" {
                        assert_eq!(outcome, Outcome::Silent, "{what} Local");
                    } else {
                        let Outcome::Answered(answer) = outcome else { panic!("{what} Local: {outcome:?}") };
                        assert_eq!(answer.node, node.name, "{what} Local");
                        assert_eq!(answer.client.ip(), lab.client().address(family), "{what} Local");
                    }
                }
            }
        }
    }
}

#[test]
fn tc_with_offloads() {
    matrix("tc", true);
}

#[test]
fn tc_without_offloads() {
    matrix("tc", false);
}

#[test]
fn native_xdp() {
    matrix("xdp", false);
}

#[test]
fn generic_xdp() {
    matrix("xdp-generic", false);
}
