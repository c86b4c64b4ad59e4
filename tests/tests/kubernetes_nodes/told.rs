//! Reports of agents about their nodes and Services through the API: the Node's condition, and
//! Events of drains.

use std::time::Duration;

use serde_json::{Value, json};
use traffic_policy_testing::agent::Agent;
use traffic_policy_testing::api_server::Kind;
use traffic_policy_testing::cluster::Cluster;
use traffic_policy_testing::control_plane::ControlPlane;
use traffic_policy_testing::lab::Lab;
use traffic_policy_testing::object::{Policy, Port, Service};

use crate::black_box::{POD_PORT, until};

const NODE_PORT: u16 = 30080;
const PATIENCE: Duration = Duration::from_secs(30);

fn web() -> Service {
    Service::new("web").port(Port::tcp(80, POD_PORT).node_port(NODE_PORT))
}

#[test]
fn the_condition_says_whether_services_work() {
    let mut cluster = Cluster::start(Lab::builder().pods(&[1])).unwrap();
    let control_plane = ControlPlane::start(&cluster.lab).unwrap();
    control_plane.apply(&web(), &cluster.backends()).unwrap();
    let server = control_plane.server();
    let name = cluster.lab.node(1).name.clone();
    let mut node = server.object(Kind::Node, "", &name).unwrap();
    node["status"]["conditions"] = json!([{"type": "Ready", "status": "True"}]);
    server.put(node).unwrap();
    let condition = |type_: &str| -> Option<Value> {
        let node = server.object(Kind::Node, "", &name).unwrap();
        let conditions = node["status"]["conditions"].as_array().unwrap();
        conditions.iter().find(|condition| condition["type"] == type_).cloned()
    };
    let is = |status: &str, reason: &str| {
        condition("ServiceProxyReady").is_some_and(|own| own["status"] == status && own["reason"] == reason)
    };
    let start = |flags: &[&str]| {
        let builder =
            Agent::builder(&cluster.lab, cluster.lab.node(1)).kubeconfig(control_plane.kubeconfig());
        builder.flags(flags).start().unwrap()
    };
    // The condition is not written without the flag.
    let mut agent = start(&[]);
    agent.wait_ready(PATIENCE).unwrap();
    agent.stop().unwrap();
    assert_eq!(condition("ServiceProxyReady"), None);
    // A role without the verb loses this and nothing else.
    server.hold_lists(Kind::EndpointSlice);
    server.refuse_patches(Some(403));
    let mut agent = start(&["--node-condition"]);
    agent.wait_said(&["WARN", "ServiceProxyReady", "nodes is forbidden", "nodes/status"], PATIENCE).unwrap();
    server.refuse_patches(None);
    until("the condition", || is("False", "NotInSync"));
    let message = condition("ServiceProxyReady").unwrap()["message"].clone();
    assert!(message.as_str().unwrap().contains("EndpointSlices"), "{message}");
    server.release_lists();
    until("all to be well", || is("True", "InSync"));
    assert_eq!(condition("Ready"), Some(json!({"type": "Ready", "status": "True"})));
    // The next agent finds the condition unchanged: nothing has happened since.
    let changed = condition("ServiceProxyReady").unwrap()["lastTransitionTime"].clone();
    agent.stop().unwrap();
    let patches = server.requests_with("PATCH /api/v1/nodes/");
    let agent = start(&["--node-condition"]);
    agent.wait_ready(PATIENCE).unwrap();
    // While the agent starts, the condition may show once that it is waiting.
    until("a patch", || server.requests_with("PATCH /api/v1/nodes/") > patches && is("True", "InSync"));
    let now = condition("ServiceProxyReady").unwrap();
    assert!(now["lastTransitionTime"].as_str() >= changed.as_str(), "{now} after {changed}");
    cluster.agents.push(agent);
}

#[test]
fn a_drain_is_told_at_both_ends() {
    let mut cluster = Cluster::start(Lab::builder().pods(&[1, 0])).unwrap();
    let backends = cluster.backends();
    let control_plane = ControlPlane::start(&cluster.lab).unwrap();
    control_plane.apply(&web(), &backends).unwrap();
    let start = |node| {
        let builder = Agent::builder(&cluster.lab, node).kubeconfig(control_plane.kubeconfig());
        builder.flags(&["--drain", "6s"]).start().unwrap()
    };
    cluster.agents = cluster.lab.nodes().iter().map(start).collect();
    cluster.agents.iter().for_each(|agent| agent.wait_ready(PATIENCE).unwrap());
    let told = || {
        let events = control_plane.server().posted_events();
        let about = |event: &&Value| event["regarding"]["name"] == "web";
        let line = |event: &Value| {
            let text = |field: &str| event[field].as_str().unwrap().to_owned();
            (text("reportingInstance"), text("reason"), text("type"))
        };
        events.iter().filter(about).map(line).collect::<Vec<_>>()
    };
    assert_eq!(told(), []);
    control_plane.apply(&web().policy(Policy::Local), &backends).unwrap();
    // The Event is that of the node without a pod only.
    let instance = cluster.lab.node(2).name.clone();
    let event = |reason: &str| (instance.clone(), reason.to_owned(), "Normal".to_owned());
    until("the drain's begin", || !told().is_empty());
    assert_eq!(told()[0], event("DrainStarted"));
    until("the drain's end", || told().len() >= 2);
    assert_eq!(told(), [event("DrainStarted"), event("DrainEnded")]);
}
