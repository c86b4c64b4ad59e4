//! The matrix of both policies, families and protocols, for each attach mode, with endpoints on
//! none, one and two nodes.

use std::time::Duration;

use traffic_policy_testing::agent::Agent;
use traffic_policy_testing::capture::Capture;
use traffic_policy_testing::checksum::Checksum;
use traffic_policy_testing::cluster::{Cluster, Protocol};
use traffic_policy_testing::lab::{Family, Lab};
use traffic_policy_testing::matrix::{self, CLUSTER, LOCAL, PODS};
use traffic_policy_testing::object::{Backend, Policy};
use traffic_policy_testing::rows;
use traffic_policy_testing::traffic::Outcome;

/// The port of a Service of [`one_agent`]: Local, with endpoints on another node only.
const ELSEWHERE: u16 = 30082;

fn all_nodes(attach: &str, wire_offloads: bool) {
    let cluster = Cluster::start(matrix::lab().wire_offloads(wire_offloads)).unwrap();
    for service in matrix::services() {
        cluster.manifests.apply(&service, &cluster.backends()).unwrap();
    }
    let agents = Agent::start_all(&cluster.lab, |agent| agent.attach(attach)).unwrap();
    let capture = Capture::start(cluster.lab.client().netns(), "eth0").unwrap();
    matrix::pass(&cluster, attach).unwrap();
    let frames = capture.finish_valid().unwrap();
    if !wire_offloads {
        // Without offloads no checksum is left unfinished, so all were verified.
        assert!(frames.iter().any(|frame| frame.checksum == Checksum::Valid));
        let unfinished = frames.iter().find(|frame| frame.checksum == Checksum::Unfinished);
        assert!(unfinished.is_none(), "{}", unfinished.unwrap());
    }
    for agent in &agents {
        the_intended_hook_works(agent, attach);
    }
}

/// A variant of [`all_nodes`] with an agent on one node, for which the others only route: a third
/// of the programs to load, for an emulated machine.
fn one_agent(attach: &str, wire_offloads: bool) {
    let cluster = Cluster::start(Lab::builder().pods(&[1, 2]).wire_offloads(wire_offloads)).unwrap();
    let (here, elsewhere): (Vec<_>, Vec<_>) = cluster.lab.pods().partition(|pod| pod.name == PODS[0]);
    assert_eq!((here.len(), elsewhere.len()), (1, 2));
    let elsewhere: Vec<_> = elsewhere.into_iter().map(Backend::of).collect();
    for (name, policy, port, backends) in [
        ("cluster", Policy::Cluster, CLUSTER, &cluster.backends()),
        ("local", Policy::Local, LOCAL, &cluster.backends()),
        ("elsewhere", Policy::Local, ELSEWHERE, &elsewhere),
    ] {
        cluster.manifests.apply(&Cluster::node_port(name, policy, port), backends).unwrap();
    }
    let agent = Agent::builder(&cluster.lab, cluster.lab.node(1)).attach(attach).start().unwrap();
    agent.wait_ready(Duration::from_secs(20)).unwrap();
    let capture = Capture::start(cluster.lab.client().netns(), "eth0").unwrap();
    for family in Family::BOTH {
        for protocol in Protocol::BOTH {
            let what = format!("{attach} {family:?} {protocol:?}");
            matrix::every_pod_answers(&cluster, family, 1, protocol).expect(&what);
            matrix::only_local_pods_answer(&cluster, family, 1, protocol).expect(&what);
            let to = cluster.at(1, family, ELSEWHERE);
            assert_eq!(cluster.ask(protocol, to).unwrap(), Outcome::Silent, "{what} Local, elsewhere");
        }
    }
    capture.finish_valid().unwrap();
    the_intended_hook_works(&agent, attach);
}

/// Checks that the intended hook did the work: the same answers would come if another one had.
fn the_intended_hook_works(agent: &Agent, attach: &str) {
    let packets = |hook, outcome| agent.packets(hook, outcome).unwrap();
    let (intended, other) = if attach == "tc" { ("tc-ingress", "xdp") } else { ("xdp", "tc-ingress") };
    for outcome in ["forwarded", "replied"] {
        let (ours, theirs) = (packets(intended, outcome), packets(other, outcome));
        // TC finishes packets whose neighbour is not resolved yet.
        assert!(ours > 0 && theirs * 4 < ours, "{attach} {outcome}: {intended} {ours}, {other} {theirs}");
        if attach == "tc" {
            assert_eq!(theirs, 0, "{attach} {outcome}");
        }
    }
}

rows! {
    fn one_agent_tc() = one_agent("tc", true);
    fn one_agent_xdp() = one_agent("xdp", false);
    fn tc_with_offloads() = all_nodes("tc", true);
    fn tc_without_offloads() = all_nodes("tc", false);
    fn native_xdp() = all_nodes("xdp", false);
    fn generic_xdp() = all_nodes("xdp-generic", false);
}
