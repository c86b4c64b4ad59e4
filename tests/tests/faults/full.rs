//! A flow table without room: what is open goes on, what is new is refused by a counted outcome.

use std::time::Duration;

use traffic_policy_testing::agent::Agent;
use traffic_policy_testing::cluster::{Cluster, Protocol};
use traffic_policy_testing::lab::{Family, Lab};
use traffic_policy_testing::object::{Backend, Policy};
use traffic_policy_testing::traffic::{HeldConnections, Outcome};

const PORT: u16 = 30080;

fn full(attach: &str) {
    let cluster = Cluster::start(Lab::builder().pods(&[0, 1])).unwrap();
    let backend = Backend::of(cluster.lab.node(2).pod(1));
    cluster.manifests.apply(&Cluster::node_port("web", Policy::Cluster, PORT), &[backend]).unwrap();
    // 32 flows; above 80 % the sweep ends those that have been idle for longest, which is why nobody stays idle here.
    let tiny = ["--flow-entries", "64", "--pending-entries", "64"];
    let agents = Agent::start_all(&cluster.lab, |agent| agent.attach(attach).flags(&tiny)).unwrap();
    let (client, to) = (cluster.lab.client().netns(), cluster.at(1, Family::V4, PORT));
    let held = HeldConnections::start(client, &[to], 24, Duration::from_millis(5)).unwrap();
    let mut silent = 0;
    for _ in 0..60 {
        let probe = Protocol::Tcp.probe(to).limit(Duration::from_millis(50));
        silent += u32::from(probe.from(client).unwrap() == Outcome::Silent);
    }
    let packets = |outcome| -> u64 {
        ["xdp", "tc-ingress"].iter().map(|hook| agents[0].packets(hook, outcome).unwrap()).sum()
    };
    let dropped = packets("dropped-table-full");
    assert!(dropped > 0, "{attach}: {silent} silent, and none counted");
    // Another family has a table of its own.
    cluster.answer(Protocol::Tcp, cluster.at(1, Family::V6, PORT)).unwrap();
    let report = held.finish();
    assert!(report.broken.is_empty(), "{attach}: {report}");
    assert_eq!(agents[0].healthz().unwrap().status, 200);
}

#[test]
fn a_full_flow_table_tc() {
    full("tc");
}

#[test]
fn a_full_flow_table_xdp() {
    full("xdp");
}
