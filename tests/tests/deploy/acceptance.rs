//! The steps of a new user, in one test: the archive of `cargo xtask image` unpacked as a node's
//! engine does it, the overlay for kind applied on nodes as kind has them, `curl` from outside
//! under both policies, the objects deleted, `cleanup`; the nodes are then as before. Runs only if
//! TRAFFIC_POLICY_IMAGE names an archive, as `cargo xtask test image` sets it.

use std::fs;

use traffic_policy_testing::attached::Attached;
use traffic_policy_testing::cluster::Protocol;
use traffic_policy_testing::container::Container;
use traffic_policy_testing::image::{Image, architecture};
use traffic_policy_testing::lab::{Cni, Family};
use traffic_policy_testing::matrix::{CLUSTER, LOCAL};
use traffic_policy_testing::netns::is_running;
use traffic_policy_testing::traffic::Outcome;

use crate::image::{archive, is_there, skipped};
use crate::nodes::{CLEANUP, Nodes, SOON, curl};
use traffic_policy_tests::remains;

use crate::pod;

const NAME: &str = "from_the_archive_to_nodes_as_they_were";
const OVERLAY: &str = "deploy/overlays/kind";

#[test]
fn from_the_archive_to_nodes_as_they_were() {
    let Some(path) = archive(NAME) else { return };
    if !Container::can_run(NAME) || !is_there(NAME, "curl") {
        return;
    }
    if let Some(program) = Cni::missing_program() {
        return skipped(NAME, &format!("there is no {program}, which kindnet's layout needs"));
    }
    let nodes = Nodes::new();
    let lab = &nodes.cluster.lab;
    let untouched: Vec<_> = lab.nodes().iter().map(|node| remains::of(node.netns())).collect();
    let unpacked = tempfile::tempdir().unwrap();
    Image::read(&path).unwrap().unpack(architecture(), unpacked.path()).unwrap();
    let program = fs::read(unpacked.path().join("traffic-policy-agent")).unwrap();

    // kubectl apply -k deploy/overlays/kind
    let spec = pod(OVERLAY);
    let mut containers: Vec<_> = (1..=3).map(|number| nodes.start(number, OVERLAY, &spec)).collect();
    for container in &mut containers {
        container.wait_ready(SOON).unwrap();
    }
    let pids: Vec<_> = containers.iter().map(|container| container.pid().unwrap()).collect();
    for pid in &pids {
        // A program that other suites start would serve as well.
        assert!(fs::read(format!("/proc/{pid}/exe")).unwrap() == program, "it is not the image's program");
    }
    curl(&nodes);
    // The node without pods has forwarded all requests.
    assert!(containers[2].packets("tc-ingress", "forwarded").unwrap() > 0);
    for number in 1..=3 {
        let (attached, sockets, pins) = nodes.traces(number);
        assert_eq!((attached.ingress, attached.egress, sockets, pins.len()), (1, 1, 9, 1), "node-{number}");
    }

    // kubectl delete -k deploy/overlays/kind: the programs keep serving.
    for container in containers {
        container.stop().unwrap();
    }
    assert!(!pids.into_iter().any(is_running));
    curl(&nodes);

    // kubectl apply -k deploy/overlays/cleanup, and delete
    let spec = pod(CLEANUP);
    for number in 1..=3 {
        let mut container = nodes.start(number, CLEANUP, &spec);
        container.wait_said("removed all programs and maps", SOON).unwrap();
        assert_eq!(container.stop().unwrap(), Some(0));
    }
    for number in 1..=3 {
        assert_eq!(nodes.traces(number), (Attached::default(), 0, Vec::new()), "node-{number}");
        let left = remains::of(lab.node(number).netns());
        remains::assert_same(&format!("node-{number}"), &untouched[number - 1], &left);
        for (family, port) in Family::BOTH.into_iter().flat_map(|family| [(family, CLUSTER), (family, LOCAL)])
        {
            let at = nodes.cluster.at(number, family, port);
            let outcome = nodes.cluster.ask(Protocol::Tcp, at).unwrap();
            assert!(!matches!(outcome, Outcome::Answered(_)), "{at}: {outcome:?}");
        }
    }
}
