//! Connections that outlive the node in front: a router moves them to another one, which does not
//! know them, also while the endpoints change. With direct forwarding and Maglev tables none is
//! cut; with a random choice all are.

mod many;
mod moves;
mod upload;

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::thread::sleep;
use std::time::Duration;

use serde_json::Value;
use traffic_policy_testing::agent::Agent;
use traffic_policy_testing::cluster::{Cluster, TARGET};
use traffic_policy_testing::lab::{Family, Lab};
use traffic_policy_testing::object::{Backend, Port, Service, lease};
use traffic_policy_testing::pace::until;
use traffic_policy_testing::traffic::HeldConnections;
use traffic_policy_testing::traffic::held::Report;

use crate::cluster::PATIENCE;
use crate::quiet;

const VIPS: [IpAddr; 2] =
    [IpAddr::V4(Ipv4Addr::new(203, 0, 113, 9)), IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0x5, 0, 0, 0, 0, 9))];
const CONNECTIONS: usize = 80;
/// The time between two requests of a connection.
const PAUSE: Duration = Duration::from_millis(20);
/// The time in which every connection has had requests: several times [`PAUSE`].
const LOOK: Duration = Duration::from_millis(500);
const OUTLIVE: [&str; 4] = ["--forwarding", "direct", "--algorithm", "maglev"];
const WITHIN_UDP: [&str; 6] = ["--forwarding", "direct", "--algorithm", "maglev", "--dispatch", "udp"];

fn service() -> Service {
    Service::new("web").port(Port::tcp(80, TARGET)).vip(VIPS[0]).vip(VIPS[1])
}

/// Starts a cluster whose first node is in front of `backends`.
fn start(pods: &[u8], attach: &str, flags: &[&str], backends: &[usize]) -> Cluster {
    start_with(&service(), pods, attach, flags, backends)
}

fn start_with(service: &Service, pods: &[u8], attach: &str, flags: &[&str], backends: &[usize]) -> Cluster {
    let lab = Lab::builder().pods(pods).wire_offloads(attach == "tc");
    let mut cluster = Cluster::start(lab).unwrap();
    let lease = |node| lease::tunnels(node, &Family::BOTH, "ipip,udp");
    let leases: Vec<_> = cluster.lab.nodes().iter().map(lease).collect();
    cluster.manifests.write("leases", &leases).unwrap();
    cluster.manifests.apply(service, &some(&cluster, backends)).unwrap();
    cluster.launch(|agent| agent.attach(attach).flags(flags)).unwrap();
    in_front(&cluster, 1);
    cluster
}

/// Makes the router send everything to this node.
fn in_front(cluster: &Cluster, number: usize) {
    for vip in VIPS {
        cluster.lab.route_vip(vip, cluster.lab.node(number)).unwrap();
    }
}

/// The backends of these numbers.
fn some(cluster: &Cluster, numbers: &[usize]) -> Vec<Backend> {
    let all: Vec<_> = cluster.lab.pods().collect();
    numbers.iter().map(|number| Backend::of(all[*number])).collect()
}

fn hold(cluster: &Cluster, family: Family) -> HeldConnections {
    let target = SocketAddr::new(VIPS[usize::from(family == Family::V6)], 80);
    let held = HeldConnections::start(cluster.lab.client().netns(), &[target], CONNECTIONS, PAUSE).unwrap();
    // Every connection is established, and has had requests.
    sleep(LOOK);
    held
}

/// Waits until every agent has this many endpoints.
fn await_endpoints(cluster: &Cluster, count: usize) {
    for agent in &cluster.agents {
        until("the endpoints are known", PATIENCE, || {
            let ports = agent.json(&["services", "default/web"]).unwrap();
            let is_so =
                |port: &Value| port["endpoints"].as_array().is_some_and(|endpoints| endpoints.len() == count);
            ports.as_array().is_some_and(|ports| ports.len() == 2 && ports.iter().all(is_so))
        });
    }
}

/// The packets that nodes behind the first two have sent on to the owner that a table named before.
fn sent_on(cluster: &Cluster) -> u64 {
    let homes = cluster.agents[2..].iter();
    homes.map(|agent| agent.packets("tc-ingress", "forwarded-to-owner").unwrap()).sum()
}

fn report(what: &str, held: HeldConnections) -> Report {
    let report = held.finish();
    println!("{what}: {report}; by pod {:?}", report.by_pod);
    report
}

#[track_caller]
fn assert_none_cut(cluster: &Cluster, family: Family, report: &Report) {
    assert_eq!((report.broken.len(), report.connections), (0, CONNECTIONS as u64), "{report}");
    let client = cluster.lab.client().address(family);
    assert_eq!(report.clients, BTreeSet::from([client]), "pods see the client");
    let least = CONNECTIONS as u64 / 20;
    assert!(report.by_pod.values().all(|connections| *connections >= least), "{:?}", report.by_pod);
}

/// The first node vanishes, and the router sends everything to the second one.
fn front_vanishes(cluster: &Cluster) {
    cluster.lab.cut(cluster.lab.node(1)).unwrap();
    in_front(cluster, 2);
    // Requests that were under way are sent again, after 200 ms at least, and then twice that.
    sleep(3 * LOOK);
}

fn the_node_in_front_vanishes(attach: &str, family: Family, flags: &[&str]) {
    let _alone = quiet::alone();
    let cluster = start(&[0, 0, 2, 2], attach, flags, &[0, 1, 2, 3]);
    let held = hold(&cluster, family);
    front_vanishes(&cluster);
    let report = report(&format!("{attach}, {family:?}, the node in front vanishes"), held);
    assert_none_cut(&cluster, family, &report);
    assert_eq!(report.by_pod.len(), 4);
}

#[test]
fn the_node_in_front_vanishes_xdp() {
    the_node_in_front_vanishes("xdp", Family::V4, &OUTLIVE);
}

/// The same without an outer packet: the endpoint's node finds by its own table what the node in
/// front has chosen.
#[test]
fn the_node_in_front_vanishes_l2() {
    let _alone = quiet::alone();
    let mut cluster = Cluster::start(Lab::builder().pods(&[0, 0, 2, 2])).unwrap();
    let leases: Vec<_> = cluster.lab.nodes().iter().map(|node| lease::takes(node, None)).collect();
    cluster.manifests.write("leases", &leases).unwrap();
    cluster.manifests.apply(&service(), &some(&cluster, &[0, 1, 2, 3])).unwrap();
    let flags = [&OUTLIVE[..], &["--dispatch", "l2", "--maglev-size", "251"]].concat();
    cluster.launch(|agent| agent.attach("xdp").flags(&flags)).unwrap();
    in_front(&cluster, 1);
    let held = hold(&cluster, Family::V4);
    front_vanishes(&cluster);
    let report = report("l2, the node in front vanishes", held);
    assert_none_cut(&cluster, Family::V4, &report);
    assert_eq!(report.by_pod.len(), 4);
}

#[test]
fn the_node_in_front_vanishes_ipv6() {
    the_node_in_front_vanishes("xdp", Family::V6, &OUTLIVE);
}

#[test]
fn the_node_in_front_vanishes_within_udp() {
    the_node_in_front_vanishes("tc", Family::V6, &WITHIN_UDP);
}

/// The control: what is not known to another node is reset, and all of it is. With the node's own
/// address: [`many`].
#[test]
fn a_random_choice_cuts_every_connection() {
    let _alone = quiet::alone();
    let cluster = start(&[0, 0, 2, 2], "tc", &["--forwarding", "direct"], &[0, 1, 2, 3]);
    let held = hold(&cluster, Family::V4);
    front_vanishes(&cluster);
    let report = report("a random choice, the node in front vanishes", held);
    assert_eq!(report.broken.len(), CONNECTIONS, "{report}");
}

/// A rolling update at the same time: the connections of pods that stay, and those of pods that
/// have left the Service and still run, go on.
fn the_endpoints_change_too(attach: &str, family: Family, flags: &[&str]) {
    the_endpoints_of_change_too(&service(), attach, family, flags);
}

fn the_endpoints_of_change_too(service: &Service, attach: &str, family: Family, flags: &[&str]) {
    let _alone = quiet::alone();
    let cluster = start_with(service, &[0, 0, 4, 4], attach, flags, &[0, 1, 4, 5]);
    let held = hold(&cluster, family);
    for backends in [&[0, 1, 2, 4, 5][..], &[1, 2, 4, 5], &[1, 2, 4, 5, 6], &[1, 2, 4, 6]] {
        cluster.manifests.endpoints(service, &some(&cluster, backends)).unwrap();
        await_endpoints(&cluster, backends.len());
    }
    assert_eq!(sent_on(&cluster), 0, "the node in front knows its connections");
    let ports = cluster.agents[2].json(&["services", "default/web"]).unwrap();
    for port in ports.as_array().unwrap() {
        let former = &port["former_owners"];
        let left = former["seconds_left"].as_f64().unwrap();
        assert!(former["slots"].as_u64() > Some(0) && left > 0.0 && left <= 240.0, "{port}");
        let endpoints = former["endpoints"].as_array().unwrap();
        assert!(endpoints.iter().any(|endpoint| endpoint["asked"] == true), "{port}");
    }
    front_vanishes(&cluster);
    let report = report(&format!("{attach}, {family:?}, the endpoints change, too"), held);
    assert_none_cut(&cluster, family, &report);
    let packets = sent_on(&cluster);
    println!("{attach}: {packets} packets were sent on to a former owner");
    assert!(packets > 0, "the control: no former owner was needed");
    // The Service's own counts, and its metrics, tell them from packets of flows in front.
    let homes = &cluster.agents[2..];
    let shown: u64 = homes.iter().map(|agent| of_service(agent, "forwarded-to-owner")).sum();
    assert!(shown >= packets, "{shown}, read later, of {packets}");
    assert_eq!(homes.iter().map(|agent| of_service(agent, "forwarded-direct")).sum::<u64>(), 0);
}

/// The packets of the Service with an outcome, as `services` has them.
fn of_service(agent: &Agent, outcome: &str) -> u64 {
    let ports = agent.json(&["services", "default/web"]).unwrap();
    let counts = ports.as_array().unwrap().iter().map(|port| port["counts"][outcome]["packets"].as_u64());
    counts.flatten().sum()
}

#[test]
fn the_endpoints_change_too_tc() {
    the_endpoints_change_too("tc", Family::V4, &OUTLIVE);
}

#[test]
fn the_endpoints_change_too_xdp() {
    the_endpoints_change_too("xdp", Family::V4, &OUTLIVE);
}

#[test]
fn the_endpoints_change_too_ipv6() {
    the_endpoints_change_too("tc", Family::V6, &OUTLIVE);
}

/// The same while the shares of endpoints are unequal before or after each change.
#[test]
fn the_endpoints_change_too_by_weight() {
    let service = service().annotation("traffic-policy.io/weight", "nodes");
    the_endpoints_of_change_too(&service, "tc", Family::V4, &OUTLIVE);
}

#[test]
fn the_endpoints_change_too_within_udp() {
    the_endpoints_change_too("xdp", Family::V4, &WITHIN_UDP);
}

/// A node that is about to go, and says so by its Lease, gets no new flows, and keeps its pods for
/// as long as they have been given: their connections go on through whichever node is in front, and
/// new ones to them get that node's address.
#[test]
fn connections_to_a_node_that_is_about_to_go() {
    let _alone = quiet::alone();
    let cluster = start(&[0, 0, 2, 2], "tc", &OUTLIVE, &[0, 1, 2, 3]);
    let held = hold(&cluster, Family::V4);
    let leases = cluster.lab.nodes().iter().map(|node| {
        let mut lease = lease::tunnels(node, &Family::BOTH, "ipip,udp");
        if node.name == "node-3" {
            lease["metadata"]["labels"]["traffic-policy.io/opens"] = "none".into();
        }
        lease
    });
    cluster.manifests.write("leases", &leases.collect::<Vec<_>>()).unwrap();
    for agent in &cluster.agents[..2] {
        until("the others know it", PATIENCE, || {
            let status = agent.json(&["status"]).unwrap();
            let by_snat = &status["agent"]["report"]["direct"]["by_snat"];
            by_snat.as_array().is_some_and(|nodes| nodes.iter().any(|node| node == "node-3"))
        });
    }
    front_vanishes(&cluster);
    let report = report("a node that is about to go", held);
    assert_none_cut(&cluster, Family::V4, &report);
    assert_eq!(report.by_pod.len(), 4);
    let later = hold(&cluster, Family::V4).finish();
    let front = cluster.lab.node(2).address(Family::V4);
    let client = cluster.lab.client().address(Family::V4);
    assert_eq!((later.broken.len(), later.clients), (0, BTreeSet::from([client, front])));
}

/// Every node is in front and has pods: one that gets a connection of its own pod is home, and its
/// agent may have been started anew since the endpoints changed.
#[test]
fn nodes_with_pods_and_an_agent_that_starts_again() {
    let _alone = quiet::alone();
    let mut cluster = start(&[2, 2, 2], "xdp", &OUTLIVE, &[0, 2, 4]);
    let held = hold(&cluster, Family::V4);
    cluster.manifests.endpoints(&service(), &some(&cluster, &[0, 1, 2, 4])).unwrap();
    await_endpoints(&cluster, 4);
    for agent in &mut cluster.agents {
        agent.kill().unwrap();
        agent.start_again().unwrap();
        agent.wait_ready(PATIENCE).unwrap();
    }
    cluster.manifests.endpoints(&service(), &some(&cluster, &[0, 1, 2, 3, 4, 5])).unwrap();
    await_endpoints(&cluster, 6);
    for number in [2, 3, 1] {
        in_front(&cluster, number);
        // Every connection has had requests by this node before the next one gets them.
        sleep(LOOK);
    }
    let report = report("nodes with pods, agents started again", held);
    assert_none_cut(&cluster, Family::V4, &report);
}
