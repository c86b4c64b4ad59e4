//! The policy is switched live, behind a load balancer that checks the health port.

use std::fmt::Write;
use std::net::SocketAddr;
use std::thread::sleep;
use std::time::Duration;

use serde_json::json;
use traffic_policy_testing::lab::Family;
use traffic_policy_testing::object::{Policy, Service};
use traffic_policy_testing::traffic::balancer::Timing;
use traffic_policy_testing::traffic::{Balancer, NewConnections, Outcome, Probe, Target, connections};

use crate::cluster::{self, NODE_PORT, web};
use crate::quiet;
use traffic_policy_testing::cluster::Cluster;

const HEALTHZ: u16 = 10256;
pub const HEALTH_PORT: u16 = 32_000;
const CONNECTIONS_PER_SECOND: u32 = 800;

/// The time that a cloud's controller needs to see a change of the Service and to configure the
/// load balancer's check.
const CONTROLLER: Duration = Duration::from_secs(2);

/// Three nodes, only the first with an endpoint, and a load balancer in front of them: 3 failures,
/// 1 s.
pub struct Balanced {
    pub balancer: Balancer,
    pub cluster: Cluster,
}

/// The Service before the switch: any node will do, and the proxy's own health decides.
pub fn policy_cluster() -> Service {
    web().spec("type", json!("LoadBalancer"))
}

pub fn policy_local() -> Service {
    policy_cluster().policy(Policy::Local).health_port(HEALTH_PORT)
}

impl Balanced {
    pub fn start(attach: &str, flags: &[&str], service: &Service, health_port: u16) -> Self {
        let mut cluster = cluster::without_agents(&[1, 0, 0], attach);
        cluster.manifests.apply(service, &cluster.backends()).unwrap();
        cluster.launch(|agent| agent.attach(attach).flags(flags)).unwrap();
        Self::before(cluster, health_port)
    }

    /// Puts a load balancer before a cluster whose agents run.
    pub fn before(cluster: Cluster, health_port: u16) -> Self {
        let targets = cluster.lab.nodes().iter().map(|node| Target {
            node: node.name.clone(),
            traffic: SocketAddr::new(node.address(Family::V4), NODE_PORT),
            health: SocketAddr::new(node.address(Family::V4), health_port),
            path: "/healthz".to_owned(),
        });
        let timing = Timing { interval: Duration::from_secs(1), failures: 3 };
        let balancer = Balancer::start(cluster.lab.client().netns(), targets.collect(), timing);
        Self { balancer, cluster }
    }

    pub fn wait_for(&self, nodes: &[&str]) {
        let there = self.balancer.wait_for(nodes, Duration::from_secs(10));
        assert!(there, "in: {:?}, {:?}", self.balancer.healthy(), self.balancer.changes());
    }

    /// Opens new connections to the nodes that the load balancer chooses.
    pub fn connect(&self, per_second: u32, total: u64) -> NewConnections {
        let chooser = self.balancer.chooser();
        let choose = move |number| chooser.choose(number);
        NewConnections::start_bounded(self.cluster.lab.client().netns(), per_second, total, choose)
    }

    /// Changes the Service under load; the load balancer checks another port a while later.
    fn switch(&self, to: &Service, health_port: u16, total: u64) -> connections::Report {
        let meter = self.connect(CONNECTIONS_PER_SECOND, total);
        // Load before the change.
        sleep(Duration::from_secs(2));
        self.cluster.manifests.service(to).unwrap();
        sleep(CONTROLLER);
        self.balancer.check_on(health_port);
        meter.wait()
    }

    /// The figures, and the changes of each node's health.
    pub fn figures(&self, what: &str, report: &connections::Report) -> String {
        let mut figures = format!("{what}\n  {report}\n  requests by node: {:?}", report.by_target);
        for change in self.balancer.changes() {
            let state = if change.healthy { "in" } else { "out" };
            write!(figures, "\n  {:.1?}: {} {state} ({})", change.at, change.node, change.answer).unwrap();
        }
        println!("{figures}");
        figures
    }
}

const ALL: [&str; 3] = ["node-1", "node-2", "node-3"];

/// Switches to Local: not one of 10,000 new connections fails.
fn to_local(attach: &str, flags: &[&str]) -> Balanced {
    let balanced = Balanced::start(attach, flags, &policy_cluster(), HEALTHZ);
    balanced.wait_for(&ALL);
    let report = balanced.switch(&policy_local(), HEALTH_PORT, 10_000);
    let figures = balanced.figures(&format!("{attach} {flags:?} Cluster → Local"), &report);
    assert_eq!((report.ok, report.failed, report.resent), (10_000, 0, 0), "{figures}");
    assert_eq!(balanced.balancer.healthy(), ["node-1"], "{figures}");
    assert!(report.by_target.values().all(|requests| *requests > 1000), "{figures}");
    balanced
}

/// Switches back to Cluster.
fn to_cluster(balanced: &Balanced, attach: &str) {
    let report = balanced.switch(&policy_cluster(), HEALTHZ, 10_000);
    let figures = balanced.figures(&format!("{attach} Local → Cluster"), &report);
    assert_eq!((report.ok, report.failed, report.resent), (10_000, 0, 0), "{figures}");
    assert_eq!(balanced.balancer.healthy(), ALL, "{figures}");
    assert!(report.by_target.values().all(|requests| *requests > 1000), "{figures}");
}

#[test]
fn tc_with_the_default_drain() {
    let _alone = quiet::alone();
    to_local("tc", &[]);
}

#[test]
fn xdp_there_and_back_and_the_drain_ends() {
    let _alone = quiet::alone();
    let balanced = to_local("xdp", &["--drain", "8s"]);
    to_cluster(&balanced, "xdp");
    let cluster = &balanced.cluster;
    cluster.manifests.service(&policy_local()).unwrap();
    let ask = || {
        let node_without = Probe::tcp(cluster.at(2, Family::V4, NODE_PORT)).limit(Duration::from_millis(300));
        node_without.from(cluster.lab.client().netns()).unwrap()
    };
    // The connections span the drain of 8 s, and its end.
    sleep(Duration::from_secs(2));
    assert!(matches!(ask(), Outcome::Answered(_)), "the drain has not begun");
    sleep(Duration::from_secs(7));
    assert_eq!(ask(), Outcome::Silent, "the drain has not ended");
}

/// The control: without the drain, as with other proxies, some connections fail.
#[test]
fn without_a_drain_connections_fail() {
    let _alone = quiet::alone();
    let balanced = Balanced::start("tc", &["--drain", "0"], &policy_cluster(), HEALTHZ);
    balanced.wait_for(&ALL);
    let report = balanced.switch(&policy_local(), HEALTH_PORT, 5000);
    let figures = balanced.figures("tc --drain 0 Cluster → Local", &report);
    assert!(report.failed > 0, "the test cannot fail: {figures}");
    assert_eq!(balanced.balancer.healthy(), ["node-1"], "{figures}");
}
