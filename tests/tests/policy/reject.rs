//! No endpoint anywhere is refused at once; no endpoint on this node (Local) is silence. A load balancer that has not
//! noticed yet tries elsewhere after silence; a refusal would reach its client.

use std::time::Duration;

use traffic_policy_tests::agent::Agent;
use traffic_policy_tests::capture::Capture;
use traffic_policy_tests::cluster::{Cluster, Protocol};
use traffic_policy_tests::lab::{Family, Lab};
use traffic_policy_tests::object::{Backend, Policy};
use traffic_policy_tests::traffic::Outcome;

const NOWHERE_CLUSTER: u16 = 30080;
const NOWHERE_LOCAL: u16 = 30081;
const UNREADY: u16 = 30082;
const ELSEWHERE: u16 = 30083;

fn refused_or_silent(attach: &str, wire_offloads: bool) {
    let cluster = Cluster::start(Lab::builder().pods(&[0, 1]).wire_offloads(wire_offloads)).unwrap();
    let pod = Backend::of(cluster.lab.node(2).pod(1));
    for (name, policy, port, backends) in [
        ("nowhere-cluster", Policy::Cluster, NOWHERE_CLUSTER, vec![]),
        // Local makes no difference as long as nobody has an endpoint.
        ("nowhere-local", Policy::Local, NOWHERE_LOCAL, vec![]),
        ("unready", Policy::Cluster, UNREADY, vec![pod.clone().not_ready()]),
        ("elsewhere", Policy::Local, ELSEWHERE, vec![pod.clone()]),
    ] {
        cluster.manifests.apply(&Cluster::node_port(name, policy, port), &backends).unwrap();
    }
    let agents = Agent::start_all(&cluster.lab, |agent| agent.attach(attach)).unwrap();
    let capture = Capture::start(cluster.lab.client().netns(), "eth0").unwrap();
    for family in Family::BOTH {
        for protocol in Protocol::BOTH {
            let what = format!("{attach} {family:?} {protocol:?}");
            for port in [NOWHERE_CLUSTER, NOWHERE_LOCAL, UNREADY] {
                let outcome = cluster.ask(protocol, cluster.at(1, family, port)).unwrap();
                assert!(outcome.is_refused_at_once(), "{what} {port}: {outcome:?}");
            }
            let silent = cluster.ask(protocol, cluster.at(1, family, ELSEWHERE)).unwrap();
            assert_eq!(silent, Outcome::Silent, "{what}");
        }
    }
    capture.finish_valid().unwrap();
    let hook = if attach == "tc" { "ingress" } else { "xdp" };
    assert!(agents[0].packets(hook, "rejected-no-endpoint").unwrap() >= 12);
    assert!(agents[0].packets(hook, "dropped-no-local-endpoint").unwrap() >= 4);
}

#[test]
fn tc() {
    refused_or_silent("tc", false);
}

#[test]
fn tc_with_offloads() {
    refused_or_silent("tc", true);
}

#[test]
fn native_xdp() {
    refused_or_silent("xdp", false);
}

#[test]
fn generic_xdp() {
    refused_or_silent("xdp-generic", false);
}

#[test]
fn follows_the_endpoints() {
    let cluster = Cluster::start(Lab::builder().pods(&[1, 1])).unwrap();
    let web = Cluster::node_port("web", Policy::Local, ELSEWHERE);
    let pods = cluster.backends();
    cluster.manifests.apply(&web, &pods).unwrap();
    let _agents = Agent::start_all(&cluster.lab, |agent| agent.attach("xdp")).unwrap();
    let to = cluster.at(1, Family::V4, ELSEWHERE);
    let (tcp, soon) = (Protocol::Tcp, Duration::from_secs(5));
    assert_eq!(cluster.answer(tcp, to).unwrap().pod, "pod-1-1");
    // The last local endpoint goes, the last of all goes, and the first comes back.
    cluster.manifests.endpoints(&web, &pods[1..]).unwrap();
    cluster.wait_for(tcp, to, soon, |outcome| *outcome == Outcome::Silent).unwrap();
    cluster.manifests.endpoints(&web, &[]).unwrap();
    cluster.wait_for(tcp, to, soon, Outcome::is_refused_at_once).unwrap();
    cluster.manifests.endpoints(&web, &pods).unwrap();
    cluster.wait_for(tcp, to, soon, |outcome| matches!(outcome, Outcome::Answered(_))).unwrap();
    // The Service itself goes: what listens there is the node's own affair, and nothing does.
    cluster.manifests.delete(&web).unwrap();
    cluster.wait_for(tcp, to, soon, Outcome::is_refused_at_once).unwrap();
}
