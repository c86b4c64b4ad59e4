//! A node without faults, the folders, and proof that `check` changes nothing.

use std::process::Command;
use std::time::Duration;

use traffic_policy_testing::agent::{self, Agent};
use traffic_policy_testing::cgroup::Cgroup;
use traffic_policy_testing::lab::Lab;

use crate::output::{check, check_in, one_node};

#[test]
fn a_fit_node_has_no_complaints_and_a_table_for_people() {
    let lab = one_node(Lab::builder());
    let checked = check(&lab, &[]);
    checked.is_well();
    let probes: Vec<_> = checked.findings.iter().map(|finding| finding["probe"].as_str().unwrap()).collect();
    for probe in [
        "kernel",
        "btf",
        "bpf-jit",
        "capabilities",
        "socket-destroy",
        "programs",
        "bpffs",
        "cgroup",
        "device",
        "mtu",
        "queues",
        "guest-offloads",
        "other-end",
        "offload",
        "xdp-program",
        "tc-programs",
        "forwarding",
        "rp-filter",
        "kube-proxy",
        "forward-policy",
        "local-port-range",
        "snat-ports",
        "listener",
    ] {
        assert!(probes.contains(&probe), "no {probe} in {probes:?}");
    }
    let mut command = Command::new(agent::program().unwrap());
    command.args(["check", "--device", "eth9", "--pin-dir"]).arg(lab.bpffs()).env_clear();
    let output = lab.node(1).netns().output(command).unwrap();
    let table = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(1));
    for text in ["CHECK", "ok", "error", "there is no device eth9 (there are: lo, ", "→ correct --device"] {
        assert!(table.contains(text), "no {text:?} in\n{table}");
    }
    assert_eq!(
        String::from_utf8(output.stderr).unwrap(),
        "traffic-policy-agent: one error: see above what to do about it\n"
    );
}

#[test]
fn folders() {
    let lab = one_node(Lab::builder());
    check_in(lab.node(1).netns(), &lab.logs(), &[]).only(
        "error",
        "bpffs",
        "is not on a BPF file system",
        "mount -t bpf",
    );
    std::fs::create_dir_all(lab.bpffs().join("old/v999/links")).unwrap();
    check_in(lab.node(1).netns(), &lab.bpffs().join("old"), &[]).only(
        "warning",
        "bpffs",
        "another layout (v999)",
        "--on-other-layout refuse",
    );
    check(&lab, &["--cgroup", "none"]).only("note", "cgroup", "are not served", "--cgroup");
    check(&lab, &["--cgroup", "/proc"]).only("error", "cgroup", "/proc is not on cgroup2", "findmnt");
    let cgroup = Cgroup::create("tp-check").unwrap();
    let path = cgroup.path().to_str().unwrap();
    check(&lab, &["--cgroup", path]).only("warning", "cgroup", "is not the root of the cgroups", "hostPath");
    let above = cgroup.path().parent().unwrap().to_str().unwrap();
    check(&lab, &["--cgroup", above]).is_well();
}

#[test]
fn nothing_is_changed() {
    let lab = one_node(Lab::builder());
    let node = lab.node(1).netns();
    let state = || (node.attached("eth0").unwrap(), std::fs::read_dir(lab.bpffs()).unwrap().count());
    let before = state();
    check(&lab, &["--attach", "xdp"]).is_well();
    assert_eq!(state(), before);
    // An agent may start meanwhile: no lock is in its way.
    let agents = Agent::start_all(&lab, |agent| agent.attach("xdp")).unwrap();
    agents[0].wait_ready(Duration::from_secs(20)).unwrap();
}
