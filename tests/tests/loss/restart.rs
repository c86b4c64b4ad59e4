//! The agents stop and start again; users of the cluster do not notice.

use std::thread::sleep;
use std::time::Duration;

use traffic_policy_testing::lab::Family;

use crate::cluster::{self, NODE_PORT, PATIENCE};
use crate::meters::{Meters, both};
use crate::quiet;
use traffic_policy_testing::cluster::Cluster;

fn restarts(attach: &str, family: Family) {
    let _alone = quiet::alone();
    let mut cluster = cluster::start(&[1, 1, 0], attach);
    let targets = both(family, |family| cluster.at(1, family, NODE_PORT));
    let start = |what: &str, cluster: &Cluster| {
        Meters::start(&format!("{attach} {family:?} {what}"), &cluster.lab, &targets, &cluster.ledger)
    };

    let meters = start("SIGKILL, 3 s without an agent, start", &cluster);
    // The sleeps are part of the test: load under the old agents, without agents, and under the new
    // ones.
    sleep(Duration::from_millis(300));
    cluster.kill_agents().unwrap();
    sleep(Duration::from_secs(3));
    cluster.start_agents_again(PATIENCE).unwrap();
    sleep(Duration::from_millis(300));
    let counted = meters.finish(&cluster.lab);
    // The path over another node and the path to a pod of the node itself were both under load.
    assert_eq!(counted.datagrams.by_pod.len(), 2);
    assert_eq!(counted.new.by_pod.len(), 2);

    // One variant for TC with IPv4 and XDP with IPv6, the other for the rest: each hook and family
    // has one.
    if (attach == "tc") == (family == Family::V4) {
        let meters = start("three times SIGKILL and start", &cluster);
        for _ in 0..3 {
            cluster.kill_agents().unwrap();
            cluster.start_agents_again(PATIENCE).unwrap();
        }
        meters.finish(&cluster.lab);
    } else {
        let meters = start("SIGTERM and start", &cluster);
        cluster.stop_agents().unwrap();
        cluster.start_agents_again(PATIENCE).unwrap();
        // Load on the next agents.
        sleep(Duration::from_millis(300));
        meters.finish(&cluster.lab);
    }
}

/// The next agent is started with another attach mode: both hooks are in place for a moment.
#[test]
fn from_tc_to_xdp_and_back() {
    let _alone = quiet::alone();
    let mut cluster = cluster::on_finished_checksums(&[1, 1, 0], "tc");
    let targets = both(Family::V4, |family| cluster.at(1, family, NODE_PORT));
    for attach in ["xdp", "tc", "xdp-generic", "tc"] {
        let what = format!("SIGKILL, start with --attach {attach}");
        let meters = Meters::start(&what, &cluster.lab, &targets, &cluster.ledger);
        cluster.kill_agents().unwrap();
        cluster.launch(|agent| agent.attach(attach)).unwrap();
        // Load on the next agents.
        sleep(Duration::from_millis(200));
        meters.finish(&cluster.lab);
    }
}

#[test]
fn tc_ipv4() {
    restarts("tc", Family::V4);
}

#[test]
fn tc_ipv6() {
    restarts("tc", Family::V6);
}

#[test]
fn xdp_ipv4() {
    restarts("xdp", Family::V4);
}

#[test]
fn xdp_ipv6() {
    restarts("xdp", Family::V6);
}
