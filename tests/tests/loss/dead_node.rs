//! A node with a third of the pods vanishes without a word, under new connections through another
//! node; and kube-proxy's rules in its place.

use std::thread::sleep;
use std::time::{Duration, Instant};

use traffic_policy_testing::cluster::Cluster;
use traffic_policy_testing::kube_proxy::{Backend, KubeProxy, Rules, TCP_AND_UDP};
use traffic_policy_testing::lab::Family;
use traffic_policy_testing::pace::{scaled, until};
use traffic_policy_testing::traffic::connections::{NewConnections, Report};

use crate::cluster::{self, NODE_PORT, POD_PORT};
use crate::quiet;

const PODS: [u8; 3] = [1, 1, 1];
/// New connections a second, and all of those that see the node vanish.
const RATE: u32 = 250;
const CONNECTIONS: u64 = 1500;
/// The time before the node vanishes.
const BEFORE: Duration = Duration::from_secs(1);
/// The longest time that a connection may take. A SYN is retransmitted after one second, and again
/// after one or two more: the first retransmission finds a node that answers.
const LIMIT: Duration = Duration::from_millis(1900);

fn meter(cluster: &Cluster, family: Family, connections: u64) -> NewConnections {
    let target = cluster.at(1, family, NODE_PORT);
    NewConnections::start_bounded(cluster.lab.client().netns(), RATE, connections, move |_| Some(target))
}

/// Cuts the last node off under load. Returns the report, and the time of the cut since the start
/// of the meter.
fn vanish(cluster: &Cluster, family: Family) -> (Report, Duration) {
    let start = Instant::now();
    let meter = meter(cluster, family, CONNECTIONS);
    sleep(BEFORE);
    cluster.lab.cut(cluster.lab.node(3)).unwrap();
    let cut = start.elapsed();
    (meter.wait(), cut)
}

/// The connections that were lost, without those whose packets may have been under way when the
/// node vanished.
fn lost(report: &Report, cut: Duration) -> usize {
    let under_way = Duration::from_millis(100);
    report.failures.iter().filter(|failure| failure.at + under_way < cut || failure.at > cut).count()
}

fn dead_node(attach: &str, family: Family) {
    let _alone = quiet::alone();
    let cluster = cluster::start(&PODS, attach);
    let gone = cluster.lab.node(3).pod(1).name.clone();
    let (report, cut) = vanish(&cluster, family);
    println!("{attach}, {family:?}, a node vanishes: {report}");
    assert_eq!(lost(&report, cut), 0, "{report}");
    assert!(report.failed <= 1, "{report}");
    assert!(report.slowest < scaled(LIMIT), "{report}");
    assert!(report.resent > 0 && report.by_pod.contains_key(&gone), "the control: it was used: {report}");
    // Nothing is sent there any more.
    let after = meter(&cluster, family, 500).wait();
    println!("{attach}, {family:?}, afterwards: {after}");
    assert!(after.is_clean() && !after.by_pod.contains_key(&gone), "{after}");

    // A dead node is asked once a second, and is back after two answers.
    cluster.lab.mend(cluster.lab.node(3)).unwrap();
    let back = Instant::now();
    until("a connection to it", Duration::from_secs(6), || {
        meter(&cluster, family, 50).wait().by_pod.contains_key(&gone)
    });
    println!("{attach}, {family:?}, back after {:?}", back.elapsed());
}

#[test]
fn xdp() {
    dead_node("xdp", Family::V4);
}

#[test]
fn tc_and_ipv6() {
    dead_node("tc", Family::V6);
}

/// The control: a third of all connections is lost until Kubernetes removes the endpoints.
#[test]
fn kube_proxy_loses_its_share() {
    let _alone = quiet::alone();
    let cluster = cluster::without_agents(&PODS, "tc");
    let lab = &cluster.lab;
    let rules = Rules {
        name: "web".to_owned(),
        protocols: TCP_AND_UDP.to_vec(),
        cluster_ip: "10.96.0.80:80".parse().unwrap(),
        vip: Some("192.0.2.80:80".parse().unwrap()),
        node_port: Some(NODE_PORT),
        endpoints: lab.pods().map(|pod| (pod.address(Family::V4), POD_PORT).into()).collect(),
        local: None,
    };
    let _rules = KubeProxy::start(lab.node(1), Family::V4, Backend::Nftables, &[rules]).unwrap();
    let (report, cut) = vanish(&cluster, Family::V4);
    println!("kube-proxy's rules, a node vanishes: {report}");
    let after = CONNECTIONS - u64::from(RATE) * cut.as_millis() as u64 / 1000;
    assert!(report.failed > after / 5, "{report}");
}
