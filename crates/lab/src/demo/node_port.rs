//! A Service of type NodePort behind a load balancer, which checks its traffic port, and then the
//! health port of an annotation.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use traffic_policy_lb::{self as lb, Event, PodEvent, Timed};
use traffic_policy_testing::cluster::TARGET;
use traffic_policy_testing::lab::{Family, Node};
use traffic_policy_testing::object::{Policy, Port, Service};
use traffic_policy_testing::pace::poll;
use traffic_policy_testing::traffic::balancer::Timing;
use traffic_policy_testing::traffic::{Target, http};

use super::cluster::{DemoCluster, section};
use super::predict;
use super::scene::{COLUMNS, Outcome, Plan, Scene};

const TRAFFIC_PORT: u16 = 30090;
const HEALTH_PORT: u16 = 31999;
const ANNOTATION: &str = "traffic-policy.io/health-check-node-port";
/// Interval of the load balancer's checks, and their time-out.
const INTERVAL: Duration = Duration::from_millis(500);
const TIMING: Timing = Timing { interval: INTERVAL, failures: 3 };
/// Time before the pod terminates; [`SERVES`] is the time for which it then serves, and [`REST`]
/// the time after that.
const QUIET: Duration = Duration::from_millis(500);
const SERVES: Duration = Duration::from_secs(2);
const REST: Duration = Duration::from_millis(2500);

/// The ports that a load balancer may check, each with its name.
pub const ASKED: [(u16, &str); 2] =
    [(TRAFFIC_PORT, "the traffic port, :30090"), (HEALTH_PORT, "health-check-node-port, :31999")];

/// Makes the Service, and predicts the end of a pod.
pub fn predict(cluster: &DemoCluster, port: u16) -> Result<Scene<'_>> {
    cluster.base.manifests.apply(&service(port), &cluster.base.backends())?;
    let like = if port == HEALTH_PORT { Some(&lb::CUSTOM) } else { lb::by_name("aws-alb") };
    let [terminating, removed] = steps(cluster);
    let plan = Plan {
        service: "plain",
        like: like.context("lb knows no aws-alb")?.clone(),
        timing: TIMING,
        events: vec![Timed { at: QUIET, event: terminating }, Timed { at: QUIET + SERVES, event: removed }],
        controller: Duration::ZERO,
        lasts: QUIET + SERVES + REST,
    };
    plan.predict(cluster)
}

/// Returns the steps in which the only pod of node-1 ends.
fn steps(cluster: &DemoCluster) -> [Event; 2] {
    let pod = &cluster.base.lab.node(1).pod(1).name;
    [PodEvent::Terminating, PodEvent::Removed].map(|step| Event::Pod(pod.clone(), step))
}

/// Plays the scene, and also returns node-3's answer to a check.
pub fn play(cluster: &DemoCluster, scene: Scene<'_>, port: u16) -> Result<(String, Outcome)> {
    let (service, mut backends) = (service(port), cluster.base.backends());
    cluster.base.manifests.apply(&service, &backends)?;
    let said = answer_of_node_3(cluster, port)?;
    let targets = cluster.base.lab.nodes().iter().map(|node| Target {
        node: node.name.clone(),
        traffic: at(node, TRAFFIC_PORT),
        health: at(node, port),
        path: "/".to_owned(),
    });
    let mut recording = scene.begin(targets.collect(), &["node-1", "node-2"])?;
    let [terminating, removed] = steps(cluster);
    let first = backends.remove(0);
    let leaving: Vec<_> = std::iter::once(first.terminating()).chain(backends.clone()).collect();
    scene.wait(&recording, QUIET);
    recording.changes(terminating, || cluster.base.manifests.endpoints(&service, &leaving))?;
    scene.wait(&recording, QUIET + SERVES);
    recording.changes(removed, || cluster.base.manifests.endpoints(&service, &backends))?;
    Ok((said, scene.end(recording, &format!("a load balancer that asks :{port}"))?))
}

pub(super) fn show(cluster: &DemoCluster) -> Result<Vec<String>> {
    section(
        "6. THE NODE PORT WITHOUT A HEALTH PORT",
        "A Service of type NodePort has no health port, so a load balancer probes its traffic port; under Local a node without a\n\
         pod lets it time out. An annotation gives it one: 503 at once, and already while the last pod of a node terminates and\n\
         still serves. Here the pod of node-1 terminates for 2 seconds, then it is gone. 2 checks a second, 3 failures.",
    );
    let mut scenes = Vec::new();
    for ((port, label), asked) in ASKED.into_iter().zip(["without", "with"]) {
        let scene = predict(cluster, port)?;
        println!("  lb: {asked} the annotation: {}", predict::node(cluster, "plain", "node-3")?);
        predict::say(&format!("{asked} the annotation"), &scene.predicted);
        scenes.push((port, label, scene));
    }
    println!("\n  {:<31} {:<22} {COLUMNS}", "ASKED", "NODE-3 SAYS");
    let mut differences = Vec::new();
    for (port, label, scene) in scenes {
        let (said, outcome) = play(cluster, scene, port)?;
        println!("  {label:<31} {said:<22} {}", outcome.figures());
        differences.extend(outcome.difference());
    }
    cluster.base.manifests.delete(&service(TRAFFIC_PORT))?;
    Ok(differences)
}

/// Returns the Service, with the annotation if its port is to be checked.
fn service(asked: u16) -> Service {
    let service =
        Service::new("plain").policy(Policy::Local).port(Port::tcp(80, TARGET).node_port(TRAFFIC_PORT));
    if asked == HEALTH_PORT { service.annotation(ANNOTATION, &HEALTH_PORT.to_string()) } else { service }
}

fn at(node: &Node, port: u16) -> SocketAddr {
    SocketAddr::new(node.address(Family::V4), port)
}

/// Returns the answer of the node without a pod to a check, once its agent and that of a node with
/// pods know the Service.
fn answer_of_node_3(cluster: &DemoCluster, port: u16) -> Result<String> {
    let client = cluster.base.lab.client().netns();
    let ask = |node: &Node| client.block_on(async || http::get(at(node, port), "/", INTERVAL).await);
    let limit = Duration::from_secs(10);
    poll(limit, || ask(cluster.base.lab.node(2)).ok().filter(|response| response.status == 200))
        .context("node-2 does not follow the Service")?;
    poll(limit, || {
        let asked = Instant::now();
        let answer = ask(cluster.base.lab.node(3));
        let took = asked.elapsed();
        match answer {
            Ok(response) => Some(format!("{} after {} ms", response.status, took.as_millis())),
            Err(_) if took >= INTERVAL => Some(format!("nothing for {} ms", took.as_millis())),
            // The node's agent has not processed the Service yet: the kernel refuses the
            // connection.
            Err(_) => None,
        }
    })
    .context("node-3 does not follow the Service")
}
