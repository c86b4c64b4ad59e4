//! Share of requests per pod.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use anyhow::Result;
use traffic_policy_testing::object::Policy;
use traffic_policy_testing::traffic::NewConnections;

use super::cluster::{DemoCluster, RATE, section};
use super::predict;

const REQUESTS: u64 = 600;

pub fn show(cluster: &DemoCluster) -> Result<()> {
    section(
        "5. THE UNEVEN LOAD",
        "node-1 has one pod, node-2 has two. Under Local a load balancer that gives each healthy node the same share\n\
         overloads the pod that is alone. The health port tells the number of pods as a weight; one that heeds it is fair.",
    );
    for policy in [Policy::Cluster, Policy::Local] {
        cluster.set(policy, Some("0"))?;
        predict::shares(cluster, &format!("{policy:?}"))?;
    }
    println!();
    let equal = |nodes: &[(SocketAddr, u64)]| nodes.iter().map(|(node, _)| *node).collect::<Vec<_>>();
    let weighted = |nodes: &[(SocketAddr, u64)]| {
        nodes.iter().flat_map(|(node, weight)| vec![*node; *weight as usize]).collect::<Vec<_>>()
    };
    type Spread<'a> = &'a dyn Fn(&[(SocketAddr, u64)]) -> Vec<SocketAddr>;
    let cases: [(&str, Policy, Spread<'_>); 3] = [
        ("Cluster, equal shares", Policy::Cluster, &equal),
        ("Local, equal shares", Policy::Local, &equal),
        ("Local, by weight header", Policy::Local, &weighted),
    ];
    for (label, policy, spread) in cases {
        cluster.set(policy, Some("0"))?;
        let mut nodes = Vec::new();
        for node in cluster.base.lab.nodes() {
            let (status, weight) = cluster.health(node, policy)?;
            if status == 200 {
                let weight = weight.and_then(|weight| weight.trim().parse().ok()).unwrap_or(1);
                nodes.push((cluster.node_port(node), weight));
            }
        }
        let turn = spread(&nodes);
        let choose = move |number: u64| turn.get((number % turn.len() as u64) as usize).copied();
        let report =
            NewConnections::start_bounded(cluster.base.lab.client().netns(), RATE * 2, REQUESTS, choose)
                .wait();
        println!("  {label}");
        bars(&report.by_pod);
    }
    Ok(())
}

fn bars(by_pod: &BTreeMap<String, u64>) {
    let total: u64 = by_pod.values().sum();
    for (pod, count) in by_pod {
        let percent = *count as f64 * 100.0 / total as f64;
        println!("    {pod:<9} {percent:>5.1} %  {}", "█".repeat((percent / 2.0).round() as usize));
    }
}
