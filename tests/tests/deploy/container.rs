//! The agent in containers made of the pods of `deploy/`, one overlay on each node: the policy
//! matrix passes, and `cleanup` leaves nothing. The root file system is the image that
//! TRAFFIC_POLICY_IMAGE names, otherwise one with the agent that all suites start.

use std::fs;
use std::path::Path;

use nix::sys::statvfs::{FsFlags, statvfs};
use traffic_policy_testing::attached::Attached;
use traffic_policy_testing::cluster::Protocol;
use traffic_policy_testing::container::Container;
use traffic_policy_testing::lab::Family;
use traffic_policy_testing::matrix::{self, CLUSTER, LOCAL};
use traffic_policy_testing::netns::is_running;
use traffic_policy_testing::pace::until;
use traffic_policy_testing::traffic::Outcome;

use crate::nodes::{CLEANUP, Nodes, SOON, curl};
use traffic_policy_tests::remains;

use crate::pod;

/// The overlays, in the order of the nodes.
const OVERLAYS: [&str; 3] = ["deploy/overlays/kind", "deploy/overlays/kubeadm", "deploy/overlays/static-pod"];

/// A hexadecimal field of `/proc/PID/status`.
fn status(pid: u32, field: &str) -> u64 {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(&format!("{field}:"))).unwrap();
    u64::from_str_radix(line.trim(), 16).unwrap()
}

/// Checks that the privileges are those that the pod requests: the matrix would pass with more,
/// too.
fn is_confined(container: &Container) {
    let pid = container.pid().unwrap();
    // CAP_BPF, CAP_NET_ADMIN, CAP_PERFMON; CAP_SYS_ADMIN and CAP_SYS_PTRACE belong to the process
    // that destroys sockets.
    let [three, two] =
        [&[39, 12, 38][..], &[21, 19]].map(|set| set.iter().fold(0, |bits, number| bits | 1 << number));
    // Without CAP_SETPCAP the bounding set stays.
    for (field, wanted) in [("CapBnd", three | two), ("CapEff", three), ("CapPrm", three)] {
        assert_eq!(status(pid, field), wanted, "{field}");
    }
    assert_eq!(status(pid, "NoNewPrivs"), 1);
    if Path::new("/usr/share/containers/seccomp.json").exists() {
        assert_eq!(status(pid, "Seccomp"), 2, "no filter of system calls");
    }
    let root = statvfs(format!("/proc/{pid}/root/.").as_str()).unwrap();
    assert!(root.flags().contains(FsFlags::ST_RDONLY), "its root can be written to");
}

#[test]
fn the_matrix_passes_in_containers_and_cleanup_leaves_nothing() {
    if !Container::can_run("the_matrix_passes_in_containers_and_cleanup_leaves_nothing") {
        return;
    }
    let nodes = Nodes::new();
    let cluster = &nodes.cluster;
    let untouched: Vec<_> = cluster.lab.nodes().iter().map(|node| remains::of(node.netns())).collect();
    let start = |(at, folder): (usize, &&str)| nodes.start(at + 1, folder, &pod(folder));
    let mut containers: Vec<_> = OVERLAYS.iter().enumerate().map(start).collect();
    for container in &mut containers {
        container.wait_ready(SOON).unwrap();
    }

    matrix::pass(cluster, "containers").unwrap();
    curl(&nodes);
    for (number, container) in (1..).zip(&containers) {
        is_confined(container);
        assert_eq!(container.probe().unwrap(), 200);
        // If something else served the requests, the test would pass without the agent.
        let forwarded = container.packets("tc-ingress", "forwarded").unwrap();
        assert!(forwarded > 0, "node-{number} has forwarded nothing");
        let (attached, sockets, pins) = nodes.traces(number);
        assert_eq!((attached.ingress, attached.egress, sockets), (1, 1, 10), "node-{number}");
        assert_eq!(pins, ["traffic-policy"]);
        let log = container.log();
        assert!(!log.contains("ERROR"), "{log}");
    }
    let silent = cluster.at(3, Family::V4, LOCAL).to_string();
    let client = cluster.lab.client().address(Family::V4).to_string();
    let explained = containers[2].exec(&["explain", &client, &silent]).unwrap();
    let explained = String::from_utf8(explained.stdout).unwrap();
    assert!(explained.contains("dropped-no-local-endpoint"), "{explained}");

    // The comparison detects programs on devices.
    let in_use = remains::of(cluster.lab.node(1).netns());
    assert_ne!(in_use, untouched[0]);

    // The DaemonSet is deleted: the programs keep serving.
    let pids: Vec<_> = containers.iter().map(|container| container.pid().unwrap()).collect();
    for container in containers {
        container.stop().unwrap();
    }
    assert!(!pids.into_iter().any(is_running));
    cluster.answer(Protocol::Tcp, cluster.at(3, Family::V4, CLUSTER)).unwrap();

    let cleanup = pod(CLEANUP);
    for number in 1..=3 {
        assert_ne!(nodes.traces(number).2, [""; 0]);
        let mut container = nodes.start(number, CLEANUP, &cleanup);
        // The container runs until it is stopped, so its log is that of this run.
        container.wait_said("removed all programs and maps", SOON).unwrap();
        assert_eq!(nodes.traces(number), (Attached::default(), 0, Vec::new()), "node-{number}");
        assert_eq!(container.stop().unwrap(), Some(0));
        let mut again = nodes.start(number, CLEANUP, &cleanup);
        again.wait_said("nothing is pinned", SOON).unwrap();
        assert_eq!(again.stop().unwrap(), Some(0));
        let left = remains::of(cluster.lab.node(number).netns());
        remains::assert_same(&format!("node-{number}"), &untouched[number - 1], &left);
    }
    let at = cluster.at(3, Family::V4, CLUSTER);
    let outcome = cluster.ask(Protocol::Tcp, at).unwrap();
    assert!(!matches!(outcome, Outcome::Answered(_)), "something else answers, too: {outcome:?}");
}

/// A container ends even after a failed assertion: a remaining agent would serve the packets of the
/// next test.
#[test]
fn a_container_ends_with_its_value() {
    if !Container::can_run("a_container_ends_with_its_value") {
        return;
    }
    let nodes = Nodes::new();
    let mut container = nodes.start(1, OVERLAYS[0], &pod(OVERLAYS[0]));
    container.wait_ready(SOON).unwrap();
    let pid = container.pid().unwrap();
    assert!(is_running(pid));
    drop(container);
    until("its process ends", SOON, || !is_running(pid));
}

/// A container without the capabilities reports them, and the node is unchanged.
#[test]
fn without_a_capability_the_container_ends_with_a_reason() {
    if !Container::can_run("without_a_capability_the_container_ends_with_a_reason") {
        return;
    }
    let nodes = Nodes::new();
    for missing in ["NET_ADMIN", "PERFMON", "BPF"] {
        let mut pod = pod(OVERLAYS[0]);
        let security = pod.containers[0].security_context.as_mut().unwrap();
        let added = security.capabilities.as_mut().unwrap().add.as_mut().unwrap();
        // SYS_ADMIN would include the others.
        added.retain(|name| name != missing && name != "SYS_ADMIN");
        // Its profile forbids bpf(2) without SYS_ADMIN, which would be another reason.
        security.seccomp_profile = None;
        let mut container = nodes.start(1, OVERLAYS[0], &pod);
        assert_eq!(container.wait_ended(SOON).unwrap(), Some(1), "{missing}: {}", container.log());
        assert!(container.log().contains(&format!("CAP_{missing}")), "{missing}: {}", container.log());
        assert_eq!(nodes.traces(1), (Attached::default(), 0, Vec::new()), "{missing}");
    }
}
