//! The matrix of both policies, families and protocols, probed at each node of a lab with endpoints
//! on none, one and two nodes.

use anyhow::{Context, Result, ensure};

use crate::cluster::{Cluster, Protocol};
use crate::lab::{Family, Lab, LabBuilder};
use crate::object::{Policy, Service};
use crate::traffic::Outcome;

pub const CLUSTER: u16 = 30080;
pub const LOCAL: u16 = 30081;
/// The pods of [`lab`].
pub const PODS: [&str; 3] = ["pod-1-1", "pod-2-1", "pod-2-2"];

/// A lab with one pod on the first node, two on the second, and none on the third.
pub fn lab() -> LabBuilder {
    Lab::builder().pods(&[1, 2, 0])
}

/// One Service of each policy.
pub fn services() -> [Service; 2] {
    [
        Cluster::node_port("cluster", Policy::Cluster, CLUSTER),
        Cluster::node_port("local", Policy::Local, LOCAL),
    ]
}

/// Probes each node with each combination.
///
/// # Errors
/// An answer comes from a pod, or shows a client address, that contradicts the policy; an answer is
/// missing; or one arrives that must not.
pub fn pass(cluster: &Cluster, what: &str) -> Result<()> {
    for family in Family::BOTH {
        for number in 1..=3 {
            for protocol in Protocol::BOTH {
                let what = || format!("{what} {family:?} {protocol:?} node-{number}");
                every_pod_answers(cluster, family, number, protocol).with_context(what)?;
                only_local_pods_answer(cluster, family, number, protocol).with_context(what)?;
            }
        }
    }
    Ok(())
}

/// Probes policy Cluster at a node. Several rounds are made, so that each hook handles many
/// packets.
pub fn every_pod_answers(cluster: &Cluster, family: Family, number: usize, protocol: Protocol) -> Result<()> {
    let lab = &cluster.lab;
    let node = lab.node(number);
    for _ in 0..4 {
        for answer in cluster.ask_until_all(protocol, cluster.at(number, family, CLUSTER), &PODS)? {
            // Only a path over two nodes needs the node's address; what stays on this node keeps
            // the client's.
            let here = answer.node == node.name;
            let source =
                if here { lab.client().address(family) } else { lab.source_towards_pods(node, family) };
            let seen = answer.client.ip();
            ensure!(seen == source, "Cluster: {} answered {seen}, not {source}", answer.pod);
        }
    }
    Ok(())
}

/// Probes policy Local at a node.
pub fn only_local_pods_answer(
    cluster: &Cluster,
    family: Family,
    number: usize,
    protocol: Protocol,
) -> Result<()> {
    let to = cluster.at(number, family, LOCAL);
    let pods = match number {
        1 => &PODS[..1],
        2 => &PODS[1..],
        _ => {
            let outcome = cluster.ask(protocol, to)?;
            ensure!(outcome == Outcome::Silent, "Local: {outcome:?} where no pod is");
            return Ok(());
        }
    };
    let client = cluster.lab.client().address(family);
    for answer in cluster.ask_until_all(protocol, to, pods)? {
        let seen = answer.client.ip();
        ensure!(seen == client, "Local: {} answered {seen}, not {client}", answer.pod);
    }
    Ok(())
}
