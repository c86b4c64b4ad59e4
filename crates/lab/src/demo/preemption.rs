//! Preemption of a node while requests arrive, and the requests that are lost.

use std::time::Duration;

use anyhow::Result;
use traffic_policy_lb::{self as lb, Change, Event, NodeChange, Timed};
use traffic_policy_testing::object::Policy;
use traffic_policy_testing::traffic::balancer::Timing;

use super::cluster::{DemoCluster, RATE, section};
use super::predict;
use super::scene::{COLUMNS, MEANING, Outcome, Plan, Scene};

/// Time before the preemption; [`REST`] is the time after it.
const QUIET: Duration = Duration::from_secs(2);
const REST: Duration = Duration::from_secs(4);

/// Predicts the scene, with the current policy.
pub fn predict(cluster: &DemoCluster) -> Result<Scene<'_>> {
    let gone = Event::Change(Change::Node(cluster.base.lab.node(3).name.clone(), NodeChange::Gone));
    let plan = Plan {
        service: "web",
        like: lb::CUSTOM,
        timing: Timing::default(),
        events: vec![Timed { at: QUIET, event: gone }],
        controller: Duration::ZERO,
        lasts: QUIET + REST,
    };
    plan.predict(cluster)
}

/// Plays the scene, under the policy for which it was predicted.
pub fn play(cluster: &DemoCluster, scene: Scene<'_>, policy: Policy) -> Result<Outcome> {
    cluster.set(policy, Some("0"))?;
    let mut recording = scene.begin(cluster.targets(policy), &cluster.healthy(policy))?;
    scene.wait(&recording, QUIET);
    let node = cluster.base.lab.node(3);
    let gone = Event::Change(Change::Node(node.name.clone(), NodeChange::Gone));
    recording.happens(gone, &[2], || cluster.base.lab.cut(node))?;
    let outcome = scene.end(recording, &format!("{policy:?}"));
    cluster.base.lab.mend(node)?;
    outcome
}

pub(super) fn show(cluster: &DemoCluster) -> Result<Vec<String>> {
    section(
        "3. THE PREEMPTED NODE",
        "A load balancer checks the nodes once a second and gives up a node after 3 failures. node-3 has no pod. After two\n\
         seconds it is preempted: gone without a word. Under Cluster it was passing requests on, and those die with it;\n\
         under Local it never got any.",
    );
    let mut scenes = Vec::new();
    for policy in [Policy::Cluster, Policy::Local] {
        cluster.set(policy, Some("0"))?;
        let scene = predict(cluster)?;
        predict::say(&format!("{policy:?}"), &scene.predicted);
        scenes.push((policy, scene));
    }
    println!();
    println!("  {:<9} {COLUMNS}   SENT TO", "POLICY");
    let mut differences = Vec::new();
    for (policy, scene) in scenes {
        let outcome = play(cluster, scene, policy)?;
        let sent = outcome.recorded.report.by_target.iter();
        let shares: Result<Vec<_>> =
            sent.map(|(target, count)| Ok(format!("{} {count}", cluster.node_at(*target)?))).collect();
        println!("  {:<9} {}   {}", outcome.label, outcome.figures(), shares?.join(", "));
        differences.extend(outcome.difference());
    }
    println!("\n  ({RATE} requests a second. The lost ones are those a user sees as an error of the CDN.)");
    println!("  {MEANING}");
    Ok(differences)
}
