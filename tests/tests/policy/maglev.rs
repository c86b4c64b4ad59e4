//! Two nodes with the same Service send the same connection to the same endpoint.

use std::net::SocketAddr;
use std::time::Duration;

use serde_json::Value;

use traffic_policy_testing::agent::Agent;
use traffic_policy_testing::cluster::{Cluster, Protocol};
use traffic_policy_testing::explain::{self, Flow};
use traffic_policy_testing::lab::{Family, Lab};
use traffic_policy_testing::object::{Backend, Policy, Service, vip};
use traffic_policy_testing::pace::{look_until, scaled};

const PORT: u16 = 30_080;
const FLOWS: u16 = 200;

fn service() -> Service {
    let service = Cluster::node_port("web", Policy::Cluster, PORT).announced();
    service.annotation("traffic-policy.io/algorithm", "maglev")
}

/// Connections to the load balancer's addresses and to a node port of this node.
fn flows(cluster: &Cluster, node: usize) -> Vec<Flow> {
    let client = cluster.lab.client();
    let of = |family| {
        let targets = [SocketAddr::new(vip(family), 80), cluster.at(node, family, PORT)];
        let sources = (40_000..40_000 + FLOWS).map(move |port| SocketAddr::new(client.address(family), port));
        sources.flat_map(move |source| targets.map(|target| Flow::new("TCP", source, target)))
    };
    Family::BOTH.into_iter().flat_map(of).collect()
}

/// The endpoint of each of them, as the node's agent explains it.
fn endpoints(cluster: &Cluster, agent: &Agent, node: usize) -> Vec<SocketAddr> {
    let answers = explain::live(agent, &flows(cluster, node), &[]).unwrap();
    answers.iter().map(|answer| answer.endpoint.unwrap_or_else(|| panic!("{answer:?}"))).collect()
}

/// Waits until the agent has `count` endpoints for each Service port, by a table of 1,021 slots.
fn wait_for(agent: &Agent, count: usize) {
    wait_for_ports(agent, &format!("{count} endpoints"), |port| {
        port["endpoints"].as_array().is_some_and(|list| list.len() == count)
            && port["algorithm"] == "maglev"
            && port["maglev_slots"] == 1021
    });
}

/// Waits until the agent has Service ports, all of which are as `is_so` says.
fn wait_for_ports(agent: &Agent, what: &str, is_so: impl Fn(&Value) -> bool) {
    look_until(
        what,
        Duration::from_secs(10),
        || agent.json(&["services", "web"]).unwrap(),
        |ports| ports.as_array().is_some_and(|ports| !ports.is_empty() && ports.iter().all(&is_so)),
    );
}

#[test]
fn nodes_agree_before_and_after_an_endpoint_leaves() {
    let cluster = Cluster::start(Lab::builder().pods(&[3, 3])).unwrap();
    let lab = &cluster.lab;
    cluster.manifests.apply(&service(), &cluster.backends()).unwrap();
    let mut agents = Agent::start_all(lab, |agent| agent.flags(&["--maglev-size", "1021"])).unwrap();
    agents.iter().for_each(|agent| wait_for(agent, 6));
    let before = endpoints(&cluster, &agents[0], 1);
    assert_eq!(before, endpoints(&cluster, &agents[1], 2));

    let mut rest: Vec<_> = lab.pods().map(Backend::of).collect();
    rest.remove(2);
    cluster.manifests.endpoints(&service(), &rest).unwrap();
    agents.iter().for_each(|agent| wait_for(agent, 5));
    let after = endpoints(&cluster, &agents[0], 1);
    assert_eq!(after, endpoints(&cluster, &agents[1], 2));
    let moved = before.iter().zip(&after).filter(|(old, new)| after.contains(old) && old != new).count();
    assert!(moved < before.len() / 10, "{moved} of {}", before.len());

    // An agent that takes over the maps keeps the table, and finds later changes.
    agents[0].kill().unwrap();
    agents[0].start_again().unwrap();
    agents[0].wait_ready(scaled(Duration::from_secs(20))).unwrap();
    assert_eq!(after, endpoints(&cluster, &agents[0], 1));
    cluster.manifests.endpoints(&service(), &cluster.backends()).unwrap();
    agents.iter().for_each(|agent| wait_for(agent, 6));
    assert_eq!(before, endpoints(&cluster, &agents[0], 1));
    assert_eq!(before, endpoints(&cluster, &agents[1], 2));

    // Real connections go where they should.
    lab.route_vip(vip(Family::V4), lab.node(1)).unwrap();
    let answer = cluster.answer(Protocol::Tcp, SocketAddr::new(vip(Family::V4), 80)).unwrap();
    assert!(lab.pods().any(|pod| pod.name == answer.pod), "{answer:?}");
}

/// The weights of an annotation, followed live: the same share for each node, then none for one.
#[test]
fn nodes_have_the_shares_that_weights_give_them() {
    let cluster = Cluster::start(Lab::builder().pods(&[3, 1])).unwrap();
    let weighted = |weight: &str| service().annotation("traffic-policy.io/weight", weight);
    cluster.manifests.apply(&weighted("nodes"), &cluster.backends()).unwrap();
    let agents = Agent::start_all(&cluster.lab, |agent| agent.flags(&["--maglev-size", "1021"])).unwrap();
    // 1,021 slots by weights 1, 1, 1, 3.
    wait_for_slots(&agents, &[170, 170, 170, 511]);
    assert_eq!(endpoints(&cluster, &agents[0], 1), endpoints(&cluster, &agents[1], 2));

    cluster.manifests.apply(&weighted("node-2=0"), &cluster.backends()).unwrap();
    wait_for_slots(&agents, &[340, 340, 341, 0]);
    let chosen = endpoints(&cluster, &agents[0], 1);
    let there: Vec<_> = cluster.lab.pods().filter(|pod| pod.name.starts_with("pod-2-")).collect();
    let family = |to: &SocketAddr| if to.is_ipv6() { Family::V6 } else { Family::V4 };
    let is_there = |to: &SocketAddr| there.iter().any(|pod| pod.address(family(to)) == to.ip());
    assert!(!there.is_empty() && !chosen.iter().any(is_there), "{chosen:?}");
    assert_eq!(chosen, endpoints(&cluster, &agents[1], 2));
}

/// Waits until every agent shows the `wanted` slots of the endpoints, each up to one more or less.
fn wait_for_slots(agents: &[Agent], wanted: &[i64]) {
    for agent in agents {
        wait_for_ports(agent, &format!("{wanted:?} slots"), |port| {
            let endpoints = port["endpoints"].as_array().unwrap();
            let slots: Vec<_> = endpoints.iter().filter_map(|endpoint| endpoint["slots"].as_i64()).collect();
            slots.len() == wanted.len() && slots.iter().zip(wanted).all(|(a, b)| (a - b).abs() <= 1)
        });
    }
}
