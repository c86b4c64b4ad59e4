//! Answers of `explain` where a connection goes on through another node in front, and on replies
//! that come back through it.

use std::net::{IpAddr, SocketAddr};

use serde_json::Value;
use traffic_policy_testing::cluster::{Cluster, TARGET};
use traffic_policy_testing::lab::{Family, Lab};
use traffic_policy_testing::object::{Backend, lease};
use traffic_policy_testing::pace::until;

use super::{PATIENCE, VIP_PORT, VIPS, service};

/// Three nodes, and a pod on the second and the third.
fn start() -> Cluster {
    let mut cluster = Cluster::start(Lab::builder().pods(&[0, 1, 1])).unwrap();
    let of = |node| lease::tunnels(node, &Family::BOTH, "ipip,udp");
    let leases: Vec<_> = cluster.lab.nodes().iter().map(of).collect();
    cluster.manifests.write("leases", &leases).unwrap();
    cluster.manifests.apply(&service(), &cluster.backends()).unwrap();
    let flags = ["--algorithm", "maglev", "--forwarding", "tunnel"];
    cluster.launch(|agent| agent.attach("tc").flags(&flags)).unwrap();
    cluster
}

fn steps(answer: &Value) -> String {
    answer["steps"].as_array().unwrap().iter().map(|step| format!("{}\n", step.as_str().unwrap())).collect()
}

/// The answer of a node on a later segment of a connection of this client.
fn later(cluster: &Cluster, node: usize, from: SocketAddr, more: &[&str]) -> Value {
    let vip = VIPS[usize::from(from.is_ipv6())];
    let (from, to) = (from.to_string(), SocketAddr::new(vip, VIP_PORT).to_string());
    let arguments = [&["explain", &from, &to, "--later"], more].concat();
    cluster.agents[node - 1].json(&arguments).unwrap()
}

#[test]
fn a_connection_that_goes_on_and_its_replies() {
    let cluster = start();
    let client = |family, port| SocketAddr::new(cluster.lab.client().address(family), port);
    let pod = |family, node| cluster.lab.node(node).pod(1).address(family);
    // A client's port whose slot leads to the second node.
    let clients = Family::BOTH.map(|family| {
        let port = (40_000..40_100).find(|port| {
            let answer = later(&cluster, 1, client(family, *port), &[]);
            assert_eq!(answer["outcome"], "forwarded-direct", "{answer}");
            assert!(steps(&answer).contains("segment: with ACK"), "{answer}");
            assert!(!steps(&answer).contains("port: "), "{answer}");
            answer["endpoint"] == SocketAddr::new(pod(family, 2), TARGET).to_string()
        });
        client(family, port.unwrap())
    });
    let opened = |node, family, client| {
        let front = cluster.lab.node(1).address(family).to_string();
        later(&cluster, node, client, &["--opened-from", &front, "--at", &pod(family, node).to_string()])
    };
    for (family, client) in Family::BOTH.into_iter().zip(clients) {
        let answer = opened(2, family, client);
        let is_reset = answer["outcome"] == "reset-no-flow" && answer["verdict"] == "reject";
        assert!(is_reset, "{answer}");
    }
    // Without the second node's endpoint the connection is still at its pod.
    cluster.manifests.apply(&service(), &[Backend::of(cluster.lab.node(3).pod(1))]).unwrap();
    for (family, client) in Family::BOTH.into_iter().zip(clients) {
        let endpoint = SocketAddr::new(pod(family, 3), TARGET).to_string();
        until("the change is in the maps", PATIENCE, || {
            later(&cluster, 1, client, &[])["endpoint"] == endpoint.as_str()
        });
        let mut answer = Value::Null;
        until("the owner's node has it, too", PATIENCE, || {
            answer = opened(3, family, client);
            answer["outcome"] == "forwarded-to-owner"
        });
        assert_eq!(answer["verdict"], "endpoints", "{answer}");
        let steps = steps(&answer);
        assert!(steps.contains(&format!("within a packet to {}, ", pod(family, 2))), "{answer}");
        assert!(!steps.contains("source becomes"), "{answer}");
    }
    // Replies come back through the node in front.
    for ((family, vip), client) in Family::BOTH.into_iter().zip(VIPS).zip(clients) {
        let (from, to) = (SocketAddr::new(vip, VIP_PORT).to_string(), client.to_string());
        let reply = |sender: IpAddr| {
            let (sender, at) = (sender.to_string(), cluster.lab.node(1).address(family).to_string());
            cluster.agents[0].json(&["explain", &from, &to, "--opened-from", &sender, "--at", &at]).unwrap()
        };
        let answer = reply(cluster.lab.node(2).address(family));
        let goes_on = answer["outcome"] == "replied-opened" && answer["verdict"] == "reply";
        assert!(goes_on, "{answer}");
        assert!(steps(&answer).contains(&format!("replies from {from} come back")), "{answer}");
        let answer = reply(client.ip());
        assert_eq!(answer["verdict"], "unhandled", "{answer}");
        assert!(steps(&answer).contains("not opened: "), "{answer}");
    }
}

#[test]
fn a_later_segment_is_one_of_tcp() {
    let cluster = Cluster::start(Lab::builder().pods(&[1])).unwrap();
    let agents = traffic_policy_testing::agent::Agent::start_first(1, &cluster.lab, |agent| agent).unwrap();
    let output = agents[0].command(&["explain", "192.0.2.1", "203.0.113.9:80/udp", "--later"]).unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("a later segment is one of TCP, not of UDP"), "{said}");
    // Nor is one asked for where a socket is.
    let more = ["explain", "192.0.2.1", "203.0.113.9:80", "--later", "--from", "node"];
    let output = agents[0].command(&more).unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("a socket is asked"), "{said}");
}
