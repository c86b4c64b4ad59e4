//! Next hops whose MAC address is not known yet, or not any more.

use std::time::{Duration, Instant};

use traffic_policy_testing::agent::Agent;
use traffic_policy_testing::cluster::{Cluster, Protocol};
use traffic_policy_testing::lab::{Family, Lab};
use traffic_policy_testing::object::{Backend, Policy};
use traffic_policy_testing::pace::{scaled, until};
use traffic_policy_testing::traffic::{HeldConnections, Outcome};

const PORT: u16 = 30080;

/// A cluster in which node-1 has its only endpoint on node-2: the packet path itself sends each
/// packet, both ways.
fn remote_only(attach: &str, prepare: impl FnOnce(&Cluster)) -> (Cluster, Vec<Agent>) {
    let cluster = Cluster::start(Lab::builder().pods(&[0, 1])).unwrap();
    let backend = Backend::of(cluster.lab.node(2).pod(1));
    cluster.manifests.apply(&Cluster::node_port("web", Policy::Cluster, PORT), &[backend]).unwrap();
    prepare(&cluster);
    let agents = Agent::start_first(1, &cluster.lab, |agent| agent.attach(attach)).unwrap();
    (cluster, agents)
}

fn the_first_packet_waits_for_its_neighbour(cluster: &Cluster, attach: &str) {
    for family in Family::BOTH {
        for protocol in Protocol::BOTH {
            // No neighbour is known; the only packet must wait for the resolution, not be lost.
            cluster.lab.flush_neighbours().unwrap();
            let probe = protocol.probe(cluster.at(1, family, PORT)).limit(Duration::from_millis(900));
            let outcome = probe.from(cluster.lab.client().netns()).unwrap();
            assert!(matches!(outcome, Outcome::Answered(_)), "{attach} {family:?} {protocol:?}: {outcome:?}");
        }
    }
}

/// Shortens the kernel's timers of the node's uplink, so that a neighbour becomes stale and is
/// given up in less than half a minute.
fn hurry(cluster: &Cluster) {
    for node in cluster.lab.nodes() {
        for family in ["ipv4", "ipv6"] {
            let settings = [
                ("base_reachable_time_ms", "1000"),
                ("delay_first_probe_time", "1"),
                ("interval_probe_time_ms", "500"),
                ("ucast_solicit", "1"),
                ("retrans_time_ms", "250"),
            ];
            for (name, value) in settings {
                node.netns().sysctl(&format!("net.{family}.neigh.eth0.{name}"), value).unwrap();
            }
        }
    }
}

/// The gateway changes its MAC address twice: it announces the first change only.
fn gateway_changes(attach: &str) {
    let (cluster, _agents) = remote_only(attach, hurry);
    gateway_changes_once(&cluster, attach, true, Duration::from_secs(2));
    gateway_changes_once(&cluster, attach, false, Duration::from_secs(20));
}

fn gateway_changes_once(cluster: &Cluster, attach: &str, announce: bool, limit: Duration) {
    let client = cluster.lab.client().netns();
    let targets = Family::BOTH.map(|family| cluster.at(1, family, PORT));
    // A flow that exists before, and is used again after.
    let old_flow = |to| Protocol::Udp.probe(to).source_port(4321).from(client).unwrap();
    let answered = |outcome: &Outcome| matches!(outcome, Outcome::Answered(_));
    for to in targets {
        assert!(answered(&old_flow(to)));
        cluster.answer(Protocol::Tcp, to).unwrap();
    }
    // The agent makes the kernel probe the neighbours of new next hops every 5 s.
    std::thread::sleep(Duration::from_secs(6));
    let held = HeldConnections::start(client, &targets, 4, Duration::from_millis(50)).unwrap();
    cluster.lab.router_change_mac(announce).unwrap();
    let what = format!("{attach} announced={announce}");
    for to in targets {
        until(&format!("{what}: an answer to the old flow to {to}"), limit, || answered(&old_flow(to)));
        for protocol in Protocol::BOTH {
            let recovered = cluster.wait_for(protocol, to, limit, answered);
            recovered.unwrap_or_else(|error| panic!("{what}: {error:#}"));
        }
    }
    let report = held.finish();
    // After a silence of more than 6 s the next retransmission of TCP comes later than the meter
    // waits.
    assert!(report.broken.is_empty() || !announce, "{what}: {report}");
}

#[test]
fn a_gateway_changes_its_mac_announced_and_silently_tc() {
    gateway_changes("tc");
}

#[test]
fn a_gateway_changes_its_mac_announced_and_silently_xdp() {
    gateway_changes("xdp");
}

/// The epoch is not raised without an agent: the packet path looks the next hop up again by itself.
/// Only an open flow has packets here: a new one would look up the FIB, and the result would hold
/// for all.
#[test]
fn a_gateways_new_mac_is_learnt_without_an_agent() {
    let (cluster, agents) = remote_only("xdp", |_| ());
    let ask = || {
        let probe = Protocol::Udp.probe(cluster.at(1, Family::V4, PORT)).source_port(4321);
        probe.limit(Duration::from_millis(300)).from(cluster.lab.client().netns()).unwrap()
    };
    let wait = |limit: Duration| {
        let start = Instant::now();
        while !matches!(ask(), Outcome::Answered(_)) {
            assert!(start.elapsed() < limit, "the old flow is lost");
        }
    };
    (0..3).for_each(|_| wait(scaled(Duration::from_secs(5))));
    for mut agent in agents {
        agent.kill().unwrap();
    }
    cluster.lab.router_change_mac(true).unwrap();
    // The packet path looks up the FIB again after 5 s.
    wait(Duration::from_secs(30));
}

/// Writes wrong entries for the next hop by hand.
fn write_wrong_neighbours(cluster: &Cluster) {
    let node = cluster.lab.node(1).netns();
    for family in Family::BOTH {
        let hop = cluster.lab.node(2).address(family);
        node.netlink(async |net| net.neighbour("eth0", hop, [2, 0, 0, 0, 9, 9]).await).unwrap();
    }
}

/// The wrong entries are deleted: the usual repair.
fn a_wrong_neighbour_is_not_used_after_its_deletion(cluster: &Cluster, attach: &str) {
    let node = cluster.lab.node(1).netns();
    for family in Family::BOTH {
        let ask = || {
            let probe = Protocol::Udp.probe(cluster.at(1, family, PORT)).source_port(4321);
            let outcome = probe.limit(Duration::from_millis(300)).from(cluster.lab.client().netns());
            matches!(outcome.unwrap(), Outcome::Answered(_))
        };
        assert!(!ask(), "{attach} {family:?}: the control");
        let hop = cluster.lab.node(2).address(family);
        node.netlink(async |net| net.delete_neighbour(hop).await).unwrap();
        // The agent raises the epoch at once; without it the packet path would look up the FIB
        // again after 5 s.
        let what = format!("{attach} {family:?}: the end of the old address");
        until(&what, Duration::from_secs(3), ask);
    }
}

fn wrong_neighbours_and_none(attach: &str) {
    let (cluster, _agents) = remote_only(attach, write_wrong_neighbours);
    a_wrong_neighbour_is_not_used_after_its_deletion(&cluster, attach);
    the_first_packet_waits_for_its_neighbour(&cluster, attach);
}

#[test]
fn wrong_neighbours_and_none_tc() {
    wrong_neighbours_and_none("tc");
}

#[test]
fn wrong_neighbours_and_none_xdp() {
    wrong_neighbours_and_none("xdp");
}
