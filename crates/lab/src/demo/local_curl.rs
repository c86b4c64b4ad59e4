//! The misleading test on a node: a load balancer gets no answer from a node where `curl localhost`
//! works.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use traffic_policy_testing::lab::Family;
use traffic_policy_testing::object::Policy;
use traffic_policy_testing::traffic::{Answer, Outcome, Probe, http};

use super::cluster::{DemoCluster, NODE_PORT, section};
use super::predict;

const PATIENCE: Duration = Duration::from_millis(800);

pub fn show(cluster: &DemoCluster) -> Result<()> {
    section(
        "2. THE TEST THAT MISLEADS",
        "Under Local a load balancer's request to node-3, which has no pod, times out. Then somebody logs in there, and\n\
         `curl localhost:30080` works: what begins on the node is not external, so the policy is not for it. The socket is\n\
         connected to a pod elsewhere before any packet exists, also on ::1.",
    );
    cluster.set(Policy::Local, Some("0"))?;
    let (node, _) = cluster.inside();
    println!("  lb: of its node port: {}\n", predict::node(cluster, "web", &node.name)?);
    let from_client = Probe::tcp(cluster.node_port(node)).from(cluster.base.lab.client().netns())?;
    println!("  {:<20} {:<20} {}", "the client", cluster.node_port(node).to_string(), said(&from_client));
    let destinations = [
        SocketAddr::new(Ipv4Addr::LOCALHOST.into(), NODE_PORT),
        SocketAddr::new(Ipv6Addr::LOCALHOST.into(), NODE_PORT),
        cluster.node_port(node),
    ];
    for to in destinations {
        let answer = fetch_there(cluster, to)?;
        let who = answer.client.ip();
        let of = if IpAddr::is_ipv4(&who) { node.address(Family::V4) } else { node.address(Family::V6) };
        let whose = if who == of { format!("{} itself", node.name) } else { "somebody else".to_owned() };
        println!(
            "  {:<20} {:<20} answered by {}, which sees {who} ({whose})",
            format!("a process of {}", node.name),
            to.to_string(),
            answer.pod
        );
    }
    println!("\nAsked on {}, without sending a packet:\n", node.name);
    let client = cluster.client().to_string();
    let at_node = cluster.node_port(node).to_string();
    explain(cluster, &[&client, &at_node])?;
    explain(cluster, &["127.0.0.1", &format!("127.0.0.1:{NODE_PORT}")])?;
    println!("What would become of the client's request under the other policy:\n");
    explain(cluster, &[&client, &at_node, "--policy", "Cluster"])
}

/// Prints the output of `explain` as a user would see it.
fn explain(cluster: &DemoCluster, arguments: &[&str]) -> Result<()> {
    let (_, agent) = cluster.inside();
    let output = agent.command(&[&["explain"], arguments].concat())?;
    let complaint = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "explain {arguments:?}: {complaint}");
    println!("  $ traffic-policy-agent explain {}", arguments.join(" "));
    for line in String::from_utf8_lossy(&output.stdout).lines() {
        println!("  {line}");
    }
    println!();
    Ok(())
}

fn said(outcome: &Outcome) -> String {
    match outcome {
        Outcome::Answered(answer) => format!("answered by {}", answer.pod),
        Outcome::Refused(_) => "refused at once".to_owned(),
        Outcome::Silent => "silence, timed out".to_owned(),
    }
}

/// Sends an HTTP request from a process of the node whose connections are served.
fn fetch_there(cluster: &DemoCluster, to: SocketAddr) -> Result<Answer> {
    let (node, _) = cluster.inside();
    let mut command = Command::new(std::env::current_exe().context("this program's own path is unknown")?);
    command.args(["--fetch", &to.to_string()]);
    cluster.cgroup().enter_on_exec(&mut command)?;
    let output = node.netns().output(command)?;
    let complaint = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "a process of {} got no answer from {to}: {complaint}", node.name);
    Answer::parse(String::from_utf8_lossy(&output.stdout).trim())
}

/// Does the work of that process.
pub fn fetch(to: SocketAddr) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let response = runtime.block_on(http::get(to, "/", PATIENCE))?;
    println!("{}", response.body.trim());
    Ok(())
}
