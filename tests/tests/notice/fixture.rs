//! A node with a Service of policy Local, and what its health ports say.

use std::time::Duration;

use serde_json::Value;
use traffic_policy_testing::agent::Agent;
use traffic_policy_testing::cluster::{Cluster, Protocol};
use traffic_policy_testing::lab::{Family, Lab};
use traffic_policy_testing::object::{Policy, Service};
use traffic_policy_testing::pace;
use traffic_policy_testing::traffic::http::{self, Response};

pub const NODE_PORT: u16 = 30080;
pub const HEALTH_PORT: u16 = 32_000;
pub const PATIENCE: Duration = Duration::from_secs(30);

pub fn web() -> Service {
    Cluster::node_port("web", Policy::Local, NODE_PORT).health_port(HEALTH_PORT)
}

/// Starts a node with one pod and an agent with these flags, which follows manifests.
pub fn node_with(flags: &[&str], adapt: impl Fn(&Lab) -> Vec<(String, String)>) -> Cluster {
    let mut cluster = Cluster::start(Lab::builder().pods(&[1])).unwrap();
    cluster.manifests.apply(&web(), &cluster.backends()).unwrap();
    let environment = adapt(&cluster.lab);
    cluster
        .launch(|builder| {
            let builder = builder.flags(flags);
            environment.iter().fold(builder, |builder, (name, value)| builder.environment(name, value))
        })
        .unwrap();
    cluster
}

/// The answer of the Service's health port on a node.
pub fn health_port(cluster: &Cluster, node: usize) -> Response {
    let server = cluster.at(node, Family::V4, HEALTH_PORT);
    http::get_from(cluster.lab.client().netns(), server, "/").unwrap()
}

pub fn body(response: &Response) -> Value {
    serde_json::from_str(&response.body).unwrap()
}

/// Waits until the agent of a node has the news, and checks what it says then, and that the packet
/// path goes on. Returns the news in /healthz.
#[track_caller]
pub fn expect_leaving(cluster: &Cluster, agent: &Agent, node: usize) -> Value {
    // It may have been started just now.
    pace::until("the agent to be ready", PATIENCE, || {
        agent.readyz().is_ok_and(|answer| answer.status == 200)
    });
    pace::until("/healthz to say 503", PATIENCE, || agent.healthz().unwrap().status == 503);
    let healthz = body(&agent.healthz().unwrap());
    assert_eq!(healthz["nodeEligible"], false, "{healthz}");
    let leaving = healthz["leaving"].clone();
    let port = health_port(cluster, node);
    assert_eq!(port.status, 503, "{}", port.body);
    assert_eq!(body(&port)["nodeLeaving"], leaving["reason"], "{}", port.body);
    assert_eq!(body(&port)["localEndpoints"], 1, "{}", port.body);
    assert_eq!((agent.livez().unwrap().status, agent.readyz().unwrap().status), (200, 200));
    for protocol in Protocol::BOTH {
        let answer = cluster.answer(protocol, cluster.at(node, Family::V4, NODE_PORT)).unwrap();
        assert_eq!(answer.node, cluster.lab.node(node).name, "new connections that still come are served");
    }
    leaving
}

/// Waits until the agent of a node has no news.
#[track_caller]
pub fn expect_staying(cluster: &Cluster, agent: &Agent, node: usize) {
    pace::until("/healthz to say 200", PATIENCE, || agent.healthz().is_ok_and(|answer| answer.status == 200));
    let port = health_port(cluster, node);
    assert_eq!(port.status, 200, "{}", port.body);
    assert!(!port.body.contains("nodeLeaving"), "as kube-proxy answers: {}", port.body);
    assert_eq!(body(&agent.healthz().unwrap()).get("leaving"), None);
}
