//! Capabilities: the agent needs three, and keeps no more.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::time::Duration;

use traffic_policy_testing::agent::{self, Agent};
use traffic_policy_testing::attached::Attached;
use traffic_policy_testing::cgroup::Cgroup;
use traffic_policy_testing::cluster::{Cluster, Protocol};
use traffic_policy_testing::lab::{Family, Lab};
use traffic_policy_testing::object::Policy;
use traffic_policy_testing::pace::until;

const PORT: u16 = 30080;
const SOON: Duration = Duration::from_secs(20);
/// CAP_BPF, CAP_NET_ADMIN, CAP_PERFMON.
const THREE: u64 = 1 << 39 | 1 << 12 | 1 << 38;
/// CAP_NET_ADMIN, CAP_SYS_ADMIN, CAP_SYS_PTRACE.
const TO_END_SOCKETS: u64 = 1 << 12 | 1 << 21 | 1 << 19;

fn cluster() -> Cluster {
    let cluster = Cluster::start(Lab::builder().pods(&[1, 1])).unwrap();
    cluster.manifests.apply(&Cluster::node_port("web", Policy::Cluster, PORT), &cluster.backends()).unwrap();
    cluster
}

/// The effective and the permitted capabilities of each thread of a process, and the bounding set.
fn capabilities(process: u32) -> Vec<[u64; 3]> {
    let tasks = fs::read_dir(format!("/proc/{process}/task")).unwrap();
    let of = |task: PathBuf| {
        let status = fs::read_to_string(task.join("status")).unwrap();
        ["CapEff:", "CapPrm:", "CapBnd:"].map(|name| {
            let hex = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
            u64::from_str_radix(hex.trim(), 16).unwrap()
        })
    };
    tasks.map(|task| of(task.unwrap().path())).collect()
}

/// The agent's binary with a bounding set, as a container runtime sets it.
pub fn limited(cluster: &Cluster, set: &str) -> PathBuf {
    let script = cluster.lab.logs().join("limited");
    let program = agent::program().unwrap();
    let text = format!("#!/bin/sh\nexec setpriv --bounding-set={set} {} \"$@\"\n", program.display());
    fs::write(&script, text).unwrap();
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).unwrap();
    script
}

#[test]
fn exactly_three_capabilities_are_enough() {
    let cluster = cluster();
    let script = limited(&cluster, "-all,+bpf,+net_admin,+perfmon");
    for attach in ["tc", "xdp", "xdp-generic"] {
        let builder = Agent::builder(&cluster.lab, cluster.lab.node(1)).attach(attach).program(&script);
        let mut agent = builder.start().unwrap();
        agent.wait_ready(SOON).unwrap();
        let held = capabilities(agent.pid().unwrap());
        assert!(held.len() > 2 && held.iter().all(|held| *held == [THREE; 3]), "{attach}: {held:x?}");
        for family in Family::BOTH {
            let to = cluster.at(1, family, PORT);
            cluster.ask_until_all(Protocol::Tcp, to, &["pod-1-1", "pod-2-1"]).unwrap();
        }
        let attached = cluster.lab.node(1).netns().attached("eth0").unwrap();
        assert_eq!(attached, Attached { xdp: attach != "tc", ingress: 1, egress: 1 }, "{attach}");
        assert!(!agent.log().contains("WARN"), "{attach}: {}", agent.log());
        agent.stop().unwrap();
    }
}

/// The children of a process that have not exited.
fn children(process: u32) -> Vec<u32> {
    let tasks = fs::read_dir(format!("/proc/{process}/task")).unwrap();
    let of = |task: PathBuf| fs::read_to_string(task.join("children")).unwrap();
    let text: String = tasks.map(|task| of(task.unwrap().path())).collect();
    text.split_whitespace().map(|child| child.parse().unwrap()).collect()
}

/// Root has all capabilities; the agent drops those that it does not need, in all threads and
/// permanently. The process that destroys sockets has those that this requires, and exits with the
/// agent, even if the agent is killed.
#[test]
fn the_rest_is_given_up() {
    let cluster = cluster();
    let cgroup = Cgroup::create("privileges").unwrap();
    for (with_cgroup, killed) in [(false, false), (true, false), (true, true)] {
        let builder = Agent::builder(&cluster.lab, cluster.lab.node(1));
        let builder = if with_cgroup { builder.cgroup(cgroup.path()) } else { builder };
        let mut agent = builder.start().unwrap();
        agent.wait_ready(SOON).unwrap();
        let process = agent.pid().unwrap();
        let held = capabilities(process);
        assert!(held.len() > 2 && held.iter().all(|held| *held == [THREE; 3]), "{with_cgroup}: {held:x?}");
        let children = children(process);
        assert_eq!(children.len(), usize::from(with_cgroup), "{children:?}");
        for child in &children {
            assert_eq!(capabilities(*child), [[TO_END_SOCKETS; 3]]);
        }
        cluster.answer(Protocol::Tcp, cluster.at(1, Family::V4, PORT)).unwrap();
        if killed {
            agent.kill().unwrap();
        } else {
            agent.stop().unwrap();
        }
        // A child that has not been reaped yet has no executable.
        let runs = |child: &u32| fs::read_link(format!("/proc/{child}/exe")).is_ok();
        until("the end of the process that ends sockets", SOON, || !children.iter().any(runs));
    }
}
