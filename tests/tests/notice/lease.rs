//! `--announce-leaving`: agents that tell each other by Leases; and the Node object as a source.

use std::fs;

use serde_json::json;
use traffic_policy_testing::agent::Agent;
use traffic_policy_testing::api_server::Kind;
use traffic_policy_testing::cluster::Cluster;
use traffic_policy_testing::control_plane::ControlPlane;
use traffic_policy_testing::lab::Lab;
use traffic_policy_testing::pace::until;

use crate::fixture::{PATIENCE, expect_leaving, expect_staying, web};

const NAMESPACE: &str = "traffic-policy-leaving";

/// Starts two nodes with a pod each, whose agents tell each other.
fn two_nodes(flags: &[&str]) -> (Cluster, ControlPlane) {
    let mut cluster = Cluster::start(Lab::builder().pods(&[1, 1])).unwrap();
    let control_plane = ControlPlane::start(&cluster.lab).unwrap();
    control_plane.apply(&web(), &cluster.backends()).unwrap();
    let start = |node| {
        let builder = Agent::builder(&cluster.lab, node).kubeconfig(control_plane.kubeconfig());
        builder.flags(&["--announce-leaving", NAMESPACE]).flags(flags).start().unwrap()
    };
    cluster.agents = cluster.lab.nodes().iter().map(start).collect();
    cluster.agents.iter().for_each(|agent| agent.wait_ready(PATIENCE).unwrap());
    (cluster, control_plane)
}

fn is_announced(control_plane: &ControlPlane, node: &str) -> bool {
    let name = format!("traffic-policy-leaving-{node}");
    control_plane.server().object(Kind::Lease, NAMESPACE, &name).is_some()
}

#[test]
fn a_node_tells_the_others_and_comes_back() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("leaving");
    let (mut cluster, control_plane) = two_nodes(&[]);
    let name = cluster.lab.node(1).name.clone();
    // Only one of the two has the source.
    let flag = format!("file:{}", path.display());
    cluster.agents[0].stop().unwrap();
    let builder = Agent::builder(&cluster.lab, cluster.lab.node(1)).kubeconfig(control_plane.kubeconfig());
    let builder = builder.flags(&["--announce-leaving", NAMESPACE, "--notice", &flag]);
    cluster.agents[0] = builder.start().unwrap();
    cluster.agents[0].wait_ready(PATIENCE).unwrap();
    assert!(!is_announced(&control_plane, &name));

    fs::write(&path, "bye").unwrap();
    expect_leaving(&cluster, &cluster.agents[0], 1);
    until("the Lease", PATIENCE, || is_announced(&control_plane, &name));
    let told = format!("other nodes that are about to go: {name}");
    cluster.agents[1].wait_said(&[&told], PATIENCE).unwrap();
    expect_staying(&cluster, &cluster.agents[1], 2);
    assert!(!cluster.agents[0].log().contains("other nodes that"), "it knows that it is itself");

    fs::remove_file(&path).unwrap();
    expect_staying(&cluster, &cluster.agents[0], 1);
    until("the Lease to go", PATIENCE, || !is_announced(&control_plane, &name));
    cluster.agents[1].wait_said(&["no other node is about to go"], PATIENCE).unwrap();
}

#[test]
fn the_taint_and_the_deletion_of_the_node_are_news() {
    let (cluster, control_plane) = two_nodes(&["--notice", "node"]);
    let server = control_plane.server();
    let name = cluster.lab.node(1).name.clone();
    let mut node = server.object(Kind::Node, "", &name).unwrap();
    node["spec"]["taints"] =
        json!([{"key": "ToBeDeletedByClusterAutoscaler", "value": "1", "effect": "NoSchedule"}]);
    server.put(node.clone()).unwrap();
    let leaving = expect_leaving(&cluster, &cluster.agents[0], 1);
    assert!(leaving["reason"].as_str().unwrap().contains("ToBeDeletedByClusterAutoscaler"), "{leaving}");
    until("the Lease", PATIENCE, || is_announced(&control_plane, &name));
    node["spec"]["taints"] = json!([]);
    server.put(node).unwrap();
    expect_staying(&cluster, &cluster.agents[0], 1);
    until("the Lease to go", PATIENCE, || !is_announced(&control_plane, &name));
    server.delete(Kind::Node, "", &name);
    let leaving = expect_leaving(&cluster, &cluster.agents[0], 1);
    assert!(leaving["reason"].as_str().unwrap().contains("deleted"), "{leaving}");
    until("the Lease again", PATIENCE, || is_announced(&control_plane, &name));
}

#[test]
fn without_permission_it_warns_and_tells_balancers_all_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("leaving");
    let flag = format!("file:{}", path.display());
    let mut cluster = Cluster::start(Lab::builder().pods(&[1])).unwrap();
    let control_plane = ControlPlane::start(&cluster.lab).unwrap();
    control_plane.apply(&web(), &cluster.backends()).unwrap();
    control_plane.server().refuse(Kind::Lease, 403);
    let builder = Agent::builder(&cluster.lab, cluster.lab.node(1)).kubeconfig(control_plane.kubeconfig());
    let builder = builder.flags(&["--announce-leaving", NAMESPACE, "--notice", &flag]);
    cluster.agents.push(builder.start().unwrap());
    let agent = &cluster.agents[0];
    agent.wait_ready(PATIENCE).unwrap();
    agent.wait_said(&["WARN", "traffic-policy-leaving-", "its role needs the verbs"], PATIENCE).unwrap();
    agent.wait_said(&["WARN", "the API server gives no Leases"], PATIENCE).unwrap();
    fs::write(&path, "").unwrap();
    expect_leaving(&cluster, agent, 1);
}
