//! The policy is changed while requests come, with and without a drain.

use std::time::Duration;

use anyhow::Result;
use traffic_policy_agent::lb::{Change, Event};
use traffic_policy_agent::model;
use traffic_policy_testing::object::Policy;

use crate::cluster::{DemoCluster, health_check, section};
use crate::foretell;

const DRAINS: [(&str, &str); 2] = [("6s", "6 s"), ("0", "none (--drain 0)")];
/// Before the change, and after it.
const QUIET: Duration = Duration::from_secs(1);
const REST: Duration = Duration::from_secs(7);

pub fn show(cluster: &DemoCluster) -> Result<()> {
    section(
        "4. THE LIVE SWITCH, CLUSTER → LOCAL",
        "The moment the policy turns Local, node-3 must take no more requests; but the load balancer needs three failed checks\n\
         to believe it. With a drain, node-3 says 503 at once and still forwards until the drain ends: nobody notices.\n\
         Without one it drops what the load balancer still sends.",
    );
    for (drain, label) in DRAINS {
        cluster.set(Policy::Cluster, Some(drain))?;
        let local = Event::Change(Change::Policy(model::Policy::Local));
        foretell::say(&format!("drain {label}"), &foretell::simulate(cluster, QUIET, local, QUIET + REST)?);
    }
    println!();
    println!("  {:<22} {:>9} {:>7} {:>7}   LOAD BALANCER", "DRAIN", "REQUESTS", "OK", "LOST");
    for (drain, label) in DRAINS {
        cluster.set(Policy::Cluster, Some(drain))?;
        let balancer = cluster.balancer(Policy::Cluster)?;
        let requests = cluster.requests(&balancer);
        // Requests before the change, as the scene's text tells.
        std::thread::sleep(QUIET);
        cluster.set(Policy::Local, Some(drain))?;
        // The cloud's controller follows the Service, too.
        let (port, path) = health_check(Policy::Local);
        balancer.ask_at(port, path);
        // Until the load balancer has given the node up, and some requests more.
        std::thread::sleep(REST);
        let report = requests.finish();
        let noticed = balancer.changes().iter().rfind(|change| !change.healthy).map_or(
            "never noticed".to_owned(),
            |change| {
                format!("gave up {} after {:.1} s: {}", change.node, change.at.as_secs_f64(), change.answer)
            },
        );
        println!(
            "  {label:<22} {:>9} {:>7} {:>7}   {noticed}",
            report.ok + report.failed,
            report.ok,
            report.failed
        );
    }
    Ok(())
}
