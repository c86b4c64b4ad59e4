//! XDP in the driver of the nodes' veths, as kind can have it: without preparation, frames that XDP
//! sends back are lost, and `check` reports it; with `veth-peer` at the other ends all requests are
//! answered; and its changes can be undone.

use std::process::{Command, Output};
use std::time::Duration;

use serde_json::Value;
use traffic_policy_testing::agent;
use traffic_policy_testing::cluster::Protocol;
use traffic_policy_testing::lab::{Cni, Family, Lab};
use traffic_policy_testing::pace::until;
use traffic_policy_testing::traffic::Outcome;
use traffic_policy_testing::xdp::Always;

use crate::layouts::STACK;
use crate::testbed::{REMOTE, Testbed};
use traffic_policy_tests::remains;

use crate::layouts;

/// The other ends of the nodes' eth0.
const PORTS: [&str; 3] = ["node-1", "node-2", "node-3"];

/// Runs the agent's program outside of the nodes.
fn outside(lab: &Lab, arguments: &[&str]) -> Output {
    let mut command = Command::new(agent::program().unwrap());
    command.args(arguments);
    lab.router().output(command).unwrap()
}

fn said(output: &Output) -> String {
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout.clone()).unwrap()
}

/// The lines that the command printed, once all has been done.
fn prepare(lab: &Lab, what: &str) -> Vec<String> {
    let output = outside(lab, &[&["veth-peer", what], &PORTS[..]].concat());
    said(&output).lines().map(str::to_owned).collect()
}

/// The output of a refused command; every port stays as it was.
fn refused(lab: &Lab, arguments: &[&str]) -> String {
    let before = PORTS.map(|port| lab.router().attached(port).unwrap());
    let output = outside(lab, &[&["veth-peer"], arguments].concat());
    assert_eq!(output.status.code(), Some(1), "{arguments:?}: {output:?}");
    assert_eq!(PORTS.map(|port| lab.router().attached(port).unwrap()), before, "{arguments:?}");
    String::from_utf8(output.stderr).unwrap()
}

/// The findings of `check` about sending and receiving by the veth.
fn complaints(testbed: &Testbed) -> Vec<Value> {
    let checked =
        testbed.cluster.agents[0].command(&["check", "--attach", "xdp", "--output", "json"]).unwrap();
    let found: Vec<Value> = serde_json::from_slice(&checked.stdout).unwrap();
    let about = |finding: &Value| finding["probe"] == "other-end" || finding["probe"] == "offload";
    found.into_iter().filter(|finding| about(finding) && finding["severity"] != "ok").collect()
}

#[test]
fn kindnet_xdp() {
    let Some(mut testbed) = Testbed::start(Cni::Kindnet, "xdp", STACK) else { return };
    let lab = &testbed.cluster.lab;
    let before = remains::of(lab.router());
    let far = testbed.cluster.at(1, Family::V4, REMOTE);
    // TC may have served the first requests, while neighbours were not resolved.
    until("what XDP sends back is lost", Duration::from_secs(30), || {
        testbed.cluster.ask(Protocol::Tcp, far).unwrap() == Outcome::Silent
    });
    let found = complaints(&testbed);
    assert_eq!(found.len(), 2, "{found:?}");
    for finding in &found {
        let fix = finding["fix"].as_str().unwrap();
        assert!(finding["severity"] == "warning" && fix.contains("veth-peer --attach"), "{finding}");
    }

    assert!(refused(lab, &["--attach", "node-1", "br0"]).contains("br0 is no veth"));
    assert!(refused(lab, &["--attach", "node-1", "veth77"]).contains("no device veth77"));
    lab.router().attach_xdp("node-2", Always::Pass).unwrap();
    for what in ["--attach", "--detach"] {
        let other = refused(lab, &[what, "node-1", "node-2"]);
        assert!(other.contains("another XDP program") && other.contains("is on node-2"), "{other}");
    }
    lab.router().detach_xdp("node-2").unwrap();
    let wrong_end = testbed.cluster.agents[0].command(&["veth-peer", "--attach", "eth0"]).unwrap();
    let wrong_end = String::from_utf8(wrong_end.stderr).unwrap();
    assert!(wrong_end.contains("name the veth's other end"), "{wrong_end}");

    let expected = |words: &str| PORTS.map(|port| format!("{port}: {words}")).to_vec();
    assert_eq!(prepare(lab, "--attach"), expected("program attached, checksum offload off"));
    assert_eq!(prepare(lab, "--attach"), expected("prepared already"));
    assert_eq!(complaints(&testbed), Vec::<Value>::new());
    layouts::ask_all(&mut testbed, Cni::Kindnet, ["xdp", STACK], [1300; 2]);

    let lab = &testbed.cluster.lab;
    let lines = prepare(lab, "--detach");
    for port in PORTS {
        let done = format!("{port}: program taken off, checksum offload on again");
        assert!(lines.contains(&done), "{lines:?}");
        let lost = format!("{port}: its other end still has an XDP program");
        assert!(lines.iter().any(|line| line.starts_with(&lost)), "{lines:?}");
    }
    assert_eq!(prepare(lab, "--detach"), expected("no program to take off"));
    remains::assert_same("the network outside of the nodes", &before, &remains::of(lab.router()));

    // `cleanup` names programs of others, on either side, and leaves them.
    assert_eq!(prepare(lab, "--attach"), expected("program attached, checksum offload off"));
    let agent = &mut testbed.cluster.agents[0];
    agent.stop().unwrap();
    let inside = said(&agent.command(&["cleanup"]).unwrap());
    assert!(inside.contains("node-1 in another network namespace, stays prepared"), "{inside}");
    let empty = lab.bpffs().join("empty");
    let there = said(&outside(lab, &["cleanup", "--pin-dir", empty.to_str().unwrap()]));
    for port in PORTS {
        assert!(there.contains(&format!("veth-peer --detach {port}`")), "{there}");
        assert!(lab.router().attached(port).unwrap().xdp, "{port}");
    }
}
