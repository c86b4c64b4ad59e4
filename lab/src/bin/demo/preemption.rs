//! A node is taken away while requests come: which of them are lost.

use std::time::Duration;

use anyhow::Result;
use traffic_policy_testing::object::Policy;

use crate::cluster::{DemoCluster, RATE, section};

pub fn show(cluster: &DemoCluster) -> Result<()> {
    section(
        "3. THE PREEMPTED NODE",
        "A load balancer checks the nodes once a second and gives up a node after 3 failures. node-3 has no pod. After two\n\
         seconds it is preempted: gone without a word. Under Cluster it was passing requests on, and those die with it;\n\
         under Local it never got any.",
    );
    println!("  {:<9} {:>9} {:>7} {:>7}   SENT TO", "POLICY", "REQUESTS", "OK", "LOST");
    for policy in [Policy::Cluster, Policy::Local] {
        cluster.set(policy, Some("0"))?;
        let balancer = cluster.balancer(policy)?;
        let requests = cluster.requests(&balancer);
        std::thread::sleep(Duration::from_secs(2));
        let node = cluster.base.lab.node(3);
        cluster.base.lab.cut(node)?;
        std::thread::sleep(Duration::from_secs(4));
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
