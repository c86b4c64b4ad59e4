//! Devices that others use keep the stack's way, and `status` and `check` say why.

use serde_json::Value;
use traffic_policy_testing::lab::{Cni, Family};
use traffic_policy_testing::pace::until;

use super::{DIRECT, MOST, PATIENCE, Scene, ask};

fn state(scene: &Scene) -> Value {
    scene.agent.json(&["status"]).unwrap()["local_delivery"].clone()
}

/// Puts something on the pod's device while a connection is open, and takes it off again.
fn used_by_others(put: &str, take: &str, reason: &str) {
    let Some(scene) = Scene::start(Cni::Kindnet, "tc", DIRECT) else { return };
    let device = scene.pod_device();
    let mut stream = scene.connect(scene.at(Family::V4));
    ask(&mut stream);
    assert!(scene.ask_often(&mut stream)[0] >= MOST);
    assert_eq!(state(&scene)["direct"], serde_json::json!([device]));

    scene.tc(&put.replace("DEV", &device));
    let said = || {
        let said = &state(&scene)["by_stack"][&device];
        said.as_str().is_some_and(|said| said.contains(reason))
    };
    until("the reason in status", PATIENCE, said);
    // The agent's own look may be a moment later than that of `status`.
    until("no program on the device", PATIENCE, || state(&scene)["direct"] == serde_json::json!([]));
    assert_eq!(scene.ask_often(&mut stream), [0, 0]);
    let output = scene.agent.command(&["check", "--local-delivery", "direct", "--output", "json"]).unwrap();
    let findings: Vec<Value> = serde_json::from_slice(&output.stdout).unwrap();
    let found = |finding: &&Value| finding["found"].as_str().unwrap().contains(reason);
    assert_eq!(findings.iter().find(found).unwrap()["probe"], "local-delivery");

    scene.tc(&take.replace("DEV", &device));
    until("the program on the device", PATIENCE, || state(&scene)["direct"] == serde_json::json!([device]));
    until("direct packets", PATIENCE, || scene.ask_often(&mut stream)[0] >= MOST);
}

#[test]
fn a_queueing_discipline() {
    used_by_others(
        "qdisc add dev DEV root tbf rate 1gbit burst 1mb latency 50ms\n",
        "qdisc del dev DEV root\n",
        "queueing discipline tbf",
    );
}

#[test]
fn a_filter() {
    used_by_others(
        "qdisc add dev DEV clsact\nfilter add dev DEV egress bpf da bytecode '1,6 0 0 0,'\n",
        "filter del dev DEV egress\n",
        "a TC filter is on it",
    );
}
