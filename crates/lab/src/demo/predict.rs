//! Predictions of `lb` and `lb simulate` for a scene before it is played, from the objects that the
//! agents follow.

use anyhow::{Context, Result};
use traffic_policy_lb::{self as lb, Answer, Fate, Judge, Overrides, Row, Simulated, What, Who};
use traffic_policy_testing::recording;

use super::cluster::DemoCluster;
use super::scene;

/// Prints one line of the prediction.
pub fn say(of: &str, simulated: &Simulated) {
    let total = simulated.total();
    let unhealthy = simulated.line.iter().find(|moment| moment.what == What::Unhealthy);
    let unhealthy = unhealthy.map_or_else(String::new, |moment| {
        format!("; {} turns unhealthy after {:.1} s", moment.nodes.join(", "), moment.at.as_secs_f64())
    });
    println!("  lb simulate: {of}: {} of {} requests are lost{unhealthy}", total.missed(), total.all());
}

/// Prints the number of healthy nodes and the share of each pod while nothing changes.
pub fn shares(cluster: &DemoCluster, of: &str) -> Result<()> {
    let objects = recording::objects(&cluster.base)?;
    let judge = Judge::new(&objects, lb::by_name("custom"), Overrides::default());
    let judgement = judge.service(&scene::named("web"));
    for port in judgement.iter().flat_map(|judgement| judgement.ports.first()) {
        let shares: Vec<_> =
            port.pods.iter().map(|pod| format!("{} {:.1} %", pod.label(), pod.share * 100.0)).collect();
        println!("  lb: {of}: {} of {} nodes healthy; {}", port.healthy(), port.nodes(), shares.join(", "));
    }
    Ok(())
}

/// Returns one line with a node's answer to the check of a balancer, which uses the traffic port
/// unless a health port is named, and the fate of a request there.
pub fn node(cluster: &DemoCluster, service: &str, node: &str) -> Result<String> {
    let objects = recording::objects(&cluster.base)?;
    let judge = Judge::new(&objects, lb::by_name("aws-alb"), Overrides::default());
    let judgement =
        judge.service(&scene::named(service)).with_context(|| format!("lb knows no Service {service}"))?;
    let port = judgement.ports.first().context("it has no port")?;
    let is_meant = |row: &&Row<'_>| match row.who {
        Who::Node(name) => name == node,
        Who::Others(_) => judge.names(port, row, row.count).contains(&node),
    };
    let row = port.rows.iter().find(is_meant).with_context(|| format!("lb knows no node {node}"))?;
    let told = match row.answer {
        Answer::Ok(_) => "200",
        Answer::Unavailable => "503",
        Answer::Open => "a connection",
        Answer::Refused => "a refusal",
        Answer::Silence => "silence",
        Answer::Announced | Answer::NotAnnounced => "nothing, for nobody asks",
    };
    let fate = match row.fate {
        Fate::Served { here: 0, .. } => "forwarded",
        Fate::Served { .. } => "served",
        Fate::Dropped => "dropped in silence",
        Fate::Refused => "refused",
    };
    Ok(format!("{node} answers a check with {told}; a request there is {fate}"))
}
