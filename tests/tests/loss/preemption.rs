//! A node without endpoints vanishes without notice, as a preemptible one does.

use std::thread::sleep;
use std::time::Duration;

use traffic_policy_testing::traffic::connections::Report;

use crate::quiet;
use crate::switch::{Balanced, HEALTH_PORT, policy_cluster, policy_local};

fn preempt(balanced: &Balanced, what: &str, connections: u64) -> (Report, String) {
    let meter = balanced.connect(200, connections);
    // Load on all nodes before one vanishes.
    sleep(Duration::from_secs(1));
    let node = balanced.cluster.lab.node(3);
    balanced.cluster.lab.cut(node).unwrap();
    let report = meter.wait();
    let figures = balanced.figures(what, &report);
    (report, figures)
}

/// The load balancer never sent it anything, so no client notices.
#[test]
fn with_policy_local_nobody_notices() {
    let _alone = quiet::alone();
    let balanced = Balanced::start("xdp", &[], &policy_local(), HEALTH_PORT);
    balanced.wait_for(&["node-1"]);
    let (report, figures) = preempt(&balanced, "node-3 preempted, policy Local", 800);
    assert_eq!((report.ok, report.failed, report.resent), (800, 0, 0), "{figures}");
}

/// Every node takes part, so packets through this one are lost until the load balancer has noticed.
#[test]
fn with_policy_cluster_requests_are_lost() {
    let _alone = quiet::alone();
    let balanced = Balanced::start("xdp", &[], &policy_cluster(), 10256);
    balanced.wait_for(&["node-1", "node-2", "node-3"]);
    let (report, figures) = preempt(&balanced, "node-3 preempted, policy Cluster", 1200);
    assert!(report.failed > 0, "{figures}");
    assert!(
        report
            .failures
            .iter()
            .all(|failure| failure.target.ip() == balanced.cluster.lab.node(3).addresses.v4)
    );
    assert_eq!(balanced.balancer.healthy(), ["node-1", "node-2"], "{figures}");
}
