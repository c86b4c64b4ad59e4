//! Change of the policy while requests arrive, with and without a drain.

use std::time::Duration;

use anyhow::Result;
use traffic_policy_cluster::model;
use traffic_policy_lb::{self as lb, Change, Event, Timed};
use traffic_policy_testing::object::Policy;
use traffic_policy_testing::traffic::balancer::Timing;

use super::cluster::{DemoCluster, health_check, section, service};
use super::predict;
use super::scene::{COLUMNS, Outcome, Plan, Scene};

const DRAINS: [(&str, &str); 2] = [("6s", "6 s"), ("0", "none (--drain 0)")];
/// Time before the change; [`REST`] is the time after it.
const QUIET: Duration = Duration::from_secs(1);
const REST: Duration = Duration::from_secs(7);
/// Time that the cloud's controller takes to follow the Service. Agents are faster.
const CONTROLLER: Duration = Duration::from_millis(500);

/// Sets policy Cluster with a drain, and predicts the switch.
pub fn predict<'c>(cluster: &'c DemoCluster, drain: &str) -> Result<Scene<'c>> {
    cluster.set(Policy::Cluster, Some(drain))?;
    let plan = Plan {
        service: "web",
        like: lb::CUSTOM,
        timing: Timing::default(),
        events: vec![Timed { at: QUIET, event: local() }],
        controller: CONTROLLER,
        lasts: QUIET + REST,
    };
    plan.predict(cluster)
}

fn local() -> Event {
    Event::Change(Change::Policy(model::Policy::Local))
}

/// Plays the scene, with the drain for which it was predicted.
pub fn play(cluster: &DemoCluster, scene: Scene<'_>, drain: &str) -> Result<Outcome> {
    cluster.set(Policy::Cluster, Some(drain))?;
    let mut recording = scene.begin(cluster.targets(Policy::Cluster), &cluster.healthy(Policy::Cluster))?;
    scene.wait(&recording, QUIET);
    recording.changes(local(), || cluster.base.manifests.service(&service(Policy::Local, Some(drain))))?;
    scene.wait(&recording, QUIET + CONTROLLER);
    let (port, path) = health_check(Policy::Local);
    recording.controller_asks(port, path)?;
    scene.end(recording, &format!("drain {drain}"))
}

pub(super) fn show(cluster: &DemoCluster) -> Result<Vec<String>> {
    section(
        "4. THE LIVE SWITCH, CLUSTER → LOCAL",
        "The moment the policy turns Local, node-3 must take no more requests; but the load balancer needs three failed checks\n\
         to believe it. With a drain, node-3 says 503 at once and still forwards until the drain ends: nobody notices.\n\
         Without one it drops what the load balancer still sends.",
    );
    let mut scenes = Vec::new();
    for (drain, label) in DRAINS {
        let scene = predict(cluster, drain)?;
        predict::say(&format!("drain {label}"), &scene.predicted);
        scenes.push((drain, label, scene));
    }
    println!();
    println!("  {:<17} {COLUMNS}   LOAD BALANCER", "DRAIN");
    let mut differences = Vec::new();
    for (drain, label, scene) in scenes {
        let outcome = play(cluster, scene, drain)?;
        println!("  {label:<17} {}   {}", outcome.figures(), noticed(&outcome));
        differences.extend(outcome.difference());
    }
    Ok(differences)
}

/// Returns the time from the beginning of the scene until the load balancer gave up a node.
fn noticed(outcome: &Outcome) -> String {
    let balancer = &outcome.recorded.balancer;
    let changes = balancer.changes();
    let Some(change) = changes.iter().rfind(|change| !change.healthy) else {
        return "never noticed".to_owned();
    };
    let at = (balancer.started() + change.at).saturating_duration_since(outcome.recorded.start);
    format!("gave up {} after {:.1} s: {}", change.node, at.as_secs_f64(), change.answer)
}
