//! A full flow table: open connections go on, and new ones are still accepted, in place of expired
//! flows and of unassured ones.

use std::time::Duration;

use traffic_policy_testing::agent::Agent;
use traffic_policy_testing::cluster::{Cluster, Protocol};
use traffic_policy_testing::lab::{Family, Lab};
use traffic_policy_testing::object::{Backend, Policy};
use traffic_policy_testing::pace::until;
use traffic_policy_testing::traffic::HeldConnections;

const PORT: u16 = 30080;
const SOON: Duration = Duration::from_secs(20);

fn full(attach: &str) {
    let cluster = Cluster::start(Lab::builder().pods(&[0, 1])).unwrap();
    let backend = Backend::of(cluster.lab.node(2).pod(1));
    cluster.manifests.apply(&Cluster::node_port("web", Policy::Cluster, PORT), &[backend]).unwrap();
    // Room for 32 flows, and 60 connections in addition to 24 that are held.
    let tiny = ["--flow-entries", "64", "--unassured-entries", "64"];
    let agent =
        Agent::builder(&cluster.lab, cluster.lab.node(1)).attach(attach).flags(&tiny).start().unwrap();
    agent.wait_ready(SOON).unwrap();
    let (client, to) = (cluster.lab.client().netns(), cluster.at(1, Family::V4, PORT));
    let held = HeldConnections::start(client, &[to], 24, Duration::from_millis(5)).unwrap();
    for _ in 0..60 {
        cluster.answer(Protocol::Tcp, to).unwrap();
    }
    // The other family has a table of its own.
    cluster.answer(Protocol::Tcp, cluster.at(1, Family::V6, PORT)).unwrap();
    // The agent has noticed, and reports it where users look.
    agent.wait_said(&["the flow table of IPv4 is full", "raise --flow-entries after"], SOON).unwrap();
    let full = |family| {
        let scrape = agent.scrape().unwrap();
        scrape.value("traffic_policy_flow_table_full_total", &[("ip_family", family)]).unwrap()
    };
    until("the count of episodes", SOON, || full("IPv4") > 0.0);
    assert!(full("IPv6") < 1.0, "{attach}");
    assert!(agent.json(&["status"]).unwrap()["flows"]["full_seconds_ago"].is_number());
    let report = held.finish();
    assert!(report.broken.is_empty(), "{attach}: {report}");
    assert_eq!(agent.healthz().unwrap().status, 200);
}

#[test]
fn a_full_flow_table_tc() {
    full("tc");
}

#[test]
fn a_full_flow_table_xdp() {
    full("xdp");
}
