//! A node is taken away while requests come: which of them are lost.

use std::time::Duration;

use anyhow::Result;
use traffic_policy_agent::lb::{Change, Event, NodeChange};
use traffic_policy_testing::object::Policy;

use crate::cluster::{DemoCluster, RATE, section};
use crate::foretell;

/// Before the preemption, and after it.
const QUIET: Duration = Duration::from_secs(2);
const REST: Duration = Duration::from_secs(4);

pub fn show(cluster: &DemoCluster) -> Result<()> {
    section(
        "3. THE PREEMPTED NODE",
        "A load balancer checks the nodes once a second and gives up a node after 3 failures. node-3 has no pod. After two\n\
         seconds it is preempted: gone without a word. Under Cluster it was passing requests on, and those die with it;\n\
         under Local it never got any.",
    );
    for policy in [Policy::Cluster, Policy::Local] {
        cluster.set(policy, Some("0"))?;
        let gone = Event::Change(Change::Node(cluster.base.lab.node(3).name.clone(), NodeChange::Gone));
        foretell::say(&format!("{policy:?}"), &foretell::simulate(cluster, QUIET, gone, QUIET + REST)?);
    }
    println!();
    println!("  {:<9} {:>9} {:>7} {:>7}   SENT TO", "POLICY", "REQUESTS", "OK", "LOST");
    for policy in [Policy::Cluster, Policy::Local] {
        cluster.set(policy, Some("0"))?;
        let balancer = cluster.balancer(policy)?;
        let requests = cluster.requests(&balancer);
        // Requests before the change, as the scene's text tells.
        std::thread::sleep(QUIET);
        let node = cluster.base.lab.node(3);
        cluster.base.lab.cut(node)?;
        // Until the load balancer has given the node up, and some requests more.
        std::thread::sleep(REST);
        let report = requests.finish();
        cluster.base.lab.mend(node)?;
        let shares: Result<Vec<_>> = report
            .by_target
            .iter()
            .map(|(target, count)| Ok(format!("{} {count}", cluster.node_at(*target)?)))
            .collect();
        println!(
            "  {:<9} {:>9} {:>7} {:>7}   {}",
            format!("{policy:?}"),
            report.ok + report.failed,
            report.ok,
            report.failed,
            shares?.join(", ")
        );
    }
    println!("\n  ({RATE} requests a second. The lost ones are those a user sees as an error of the CDN.)");
    Ok(())
}
