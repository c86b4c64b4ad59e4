//! Each policy on each node: the pod that answers, the client address it sees, whether there is a
//! second hop, and the answer of the health-check port.

use std::collections::BTreeSet;
use std::io::{Error, ErrorKind};
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::Result;
use traffic_policy_testing::object::Policy;
use traffic_policy_testing::traffic::{Answer, Outcome, Probe, http};

use super::cluster::{DemoCluster, health_check, section};
use super::predict;

const REQUESTS: usize = 12;

pub fn show(cluster: &DemoCluster) -> Result<()> {
    section(
        "1. THE TWO POLICIES",
        "Cluster: every node takes requests and forwards them to any pod; a second hop, and then the pod sees the node's\n\
         address. Local: a node takes requests for its own pods only and the pod sees the client; a node without a pod\n\
         drops in silence — and says so on the health port, for load balancers that listen.",
    );
    for policy in [Policy::Cluster, Policy::Local] {
        cluster.set(policy, Some("0"))?;
        let (port, path) = health_check(policy);
        predict::shares(cluster, &format!("{policy:?}"))?;
        println!("externalTrafficPolicy: {policy:?}   (a load balancer asks :{port}{path})");
        println!(
            "  {:<7} {:<5} {:<32} {:<26} {:<12} HEALTH PORT",
            "NODE", "", "ANSWERED BY", "CLIENT ADDRESS AT THE POD", "SECOND HOP"
        );
        for node in cluster.base.lab.nodes() {
            let (status, weight) = cluster.health(node, policy)?;
            let health = weight.map_or(format!("{status}"), |weight| format!("{status}, weight {weight}"));
            for (name, udp) in [("HTTP", false), ("UDP", true)] {
                let mut row = Row::default();
                for _ in 0..REQUESTS {
                    let to = cluster.node_port(node);
                    let outcome = if udp {
                        Probe::udp(to).from(cluster.base.lab.client().netns())?
                    } else {
                        get(cluster, to)?
                    };
                    let silent = outcome == Outcome::Silent;
                    row.add(outcome, cluster, &node.name);
                    if silent {
                        // Further requests without an answer would show nothing new.
                        break;
                    }
                }
                let [who, whom, hop] = row.cells();
                println!("  {:<7} {name:<5} {who:<32} {whom:<26} {hop:<12} {health}", node.name);
            }
        }
        println!();
    }
    println!(
        "The trap: on node-3 a load balancer without health check times out under Local, for the drop is meant to be silent:\n\
         a refusal would reach the user, a retry may reach a good node. 503 on the health port is the sign to heed."
    );
    Ok(())
}

/// Sends one HTTP request from the client.
fn get(cluster: &DemoCluster, to: SocketAddr) -> Result<Outcome> {
    let limit = Duration::from_millis(800);
    match cluster.base.lab.client().netns().block_on(async || http::get(to, "/", limit).await) {
        Ok(response) => Ok(Outcome::Answered(Answer::parse(response.body.trim())?)),
        Err(error) => {
            let refused = |error: &Error| error.kind() == ErrorKind::ConnectionRefused;
            let refused = error.chain().filter_map(|cause| cause.downcast_ref()).any(refused);
            Ok(if refused { Outcome::Refused(limit) } else { Outcome::Silent })
        }
    }
}

#[derive(Default)]
struct Row {
    pods: BTreeSet<String>,
    clients: BTreeSet<String>,
    hops: BTreeSet<&'static str>,
    nothing: Option<String>,
}

impl Row {
    fn add(&mut self, outcome: Outcome, cluster: &DemoCluster, node: &str) {
        match outcome {
            Outcome::Answered(answer) => {
                let seen = answer.client.ip();
                let of = if seen == cluster.client() { "client" } else { "node" };
                self.clients.insert(format!("{seen} ({of})"));
                self.hops.insert(if answer.node == node { "no" } else { "yes" });
                self.pods.insert(answer.pod);
            }
            Outcome::Refused(_) => self.nothing = Some("refused at once".to_owned()),
            Outcome::Silent => self.nothing = Some("nobody: silence, timed out".to_owned()),
        }
    }

    fn cells(self) -> [String; 3] {
        if let Some(nothing) = self.nothing {
            return [nothing, "–".to_owned(), "–".to_owned()];
        }
        let join = |set: Vec<String>| set.join(", ");
        let clients: Vec<String> = match self.clients.len() {
            0..=1 => self.clients.into_iter().collect(),
            // A row is one line: the kinds of addresses suffice.
            _ => vec!["client's or node's".to_owned()],
        };
        let hop = if self.hops.len() > 1 { "sometimes".to_owned() } else { self.hops.into_iter().collect() };
        [join(self.pods.into_iter().collect()), join(clients), hop]
    }
}
