//! Direct forwarding within UDP, and nodes that open different packets.

use std::net::IpAddr;
use std::time::Duration;

use traffic_policy_testing::agent::Agent;
use traffic_policy_testing::capture::Capture;
use traffic_policy_testing::cluster::{Cluster, Protocol};
use traffic_policy_testing::lab::{Family, Lab};
use traffic_policy_testing::object::lease;
use traffic_policy_testing::pace;
use traffic_policy_testing::traffic::HeldConnections;

use super::pods_see_the_client;
use super::{IP6IP6, IPIP, NODE_PORT, VIPS, answers, bulk_data_passes, header, seen, service};

pub const UDP: u8 = 17;
const BOTH: &str = "ipip,udp";

/// Starts three nodes with agents, and a pod on the second and the third. `opening`: the dispatches
/// in each node's Lease; empty: a Lease without them, as an agent of a former version writes it.
fn start(attach: &str, dispatch: &str, opening: [&str; 3]) -> Cluster {
    let mut cluster = Cluster::start(Lab::builder().pods(&[0, 1, 1])).unwrap();
    write_leases(&cluster, opening);
    cluster.manifests.apply(&service(), &cluster.backends()).unwrap();
    let flags = ["--forwarding", "direct", "--dispatch", dispatch];
    cluster.launch(|agent| agent.attach(attach).flags(&flags)).unwrap();
    for vip in VIPS {
        cluster.lab.route_vip(vip, cluster.lab.node(1)).unwrap();
    }
    cluster
}

fn write_leases(cluster: &Cluster, opening: [&str; 3]) {
    let leases: Vec<_> = cluster
        .lab
        .nodes()
        .iter()
        .zip(opening)
        .map(|(node, opened)| match opened {
            "" => lease::opens(node, &Family::BOTH),
            _ => lease::opens_dispatch(node, &Family::BOTH, opened),
        })
        .collect();
    cluster.manifests.write("leases", &leases).unwrap();
}

#[test]
fn endpoints_see_the_client_tc() {
    pods_see_the_client(&start("tc", "udp", [BOTH; 3]), "tc", |_| UDP);
}

#[test]
fn endpoints_see_the_client_xdp() {
    pods_see_the_client(&start("xdp", "udp", [BOTH; 3]), "xdp", |_| UDP);
}

/// Aggregates of up to 64 KB with unfinished checksums.
#[test]
fn bulk_data_passes_tc_with_offloads() {
    bulk_data_passes("tc", "udp", true);
}

#[test]
fn bulk_data_passes_xdp() {
    bulk_data_passes("xdp", "udp", false);
}

/// The protocols of what reaches a node's pod from the node in front, and the clients that the pod
/// sees.
fn reached(cluster: &Cluster, family: Family, number: usize) -> (Vec<u8>, Vec<IpAddr>) {
    let (front, node) = (cluster.lab.node(1).address(family), cluster.lab.node(number));
    let pods: Vec<_> = cluster.lab.pods().map(|pod| pod.address(family)).collect();
    let capture = Capture::start(node.netns(), "eth0").unwrap();
    let answers = answers(cluster, Protocol::Tcp, cluster.at(1, family, NODE_PORT));
    let frames = capture.finish_valid().unwrap();
    let headers = frames.iter().filter(|frame| !frame.outgoing).filter_map(header);
    let mut protocols: Vec<_> =
        headers.filter(|(_, from, to)| *from == front && pods.contains(to)).map(|found| found.0).collect();
    protocols.sort_unstable();
    protocols.dedup();
    (protocols, seen(&answers, &node.name))
}

/// Each node gets packets in a dispatch that it opens and that `--dispatch` of the node in front
/// permits; without one, by SNAT. The flag matters on the node in front alone, so only that agent
/// is started again for each case.
#[test]
fn nodes_of_all_kinds_are_in_one_cluster() {
    const TCP: u8 = 6;
    let kinds = [
        ("udp", [BOTH, BOTH, ""], [Some("udp"), None]),
        ("ipip", [BOTH, "udp", ""], [None, Some("ipip")]),
        ("auto", [BOTH, "udp,ipip", ""], [Some("udp"), Some("ipip")]),
    ];
    let mut cluster = start("tc", kinds[0].0, kinds[0].1);
    for (number, (dispatch, opening, [second, third])) in kinds.into_iter().enumerate() {
        if number > 0 {
            cluster.agents[0].stop().unwrap();
            write_leases(&cluster, opening);
            let flags = ["--forwarding", "direct", "--dispatch", dispatch];
            let front = Agent::builder(&cluster.lab, cluster.lab.node(1)).attach("tc").flags(&flags);
            cluster.agents[0] = front.start().unwrap();
            cluster.agents[0].wait_ready(Duration::from_secs(20)).unwrap();
        }
        for family in Family::BOTH {
            let ipip = if family == Family::V4 { IPIP } else { IP6IP6 };
            let (client, front) = (cluster.lab.client().address(family), cluster.lab.node(1).address(family));
            for (number, used) in [(2, second), (3, third)] {
                let (protocol, address) = match used {
                    None => (TCP, front),
                    Some("udp") => (UDP, client),
                    Some(_) => (ipip, client),
                };
                let (protocols, seen) = reached(&cluster, family, number);
                let what = format!("{dispatch} towards node-{number}, which opens {opening:?}, {family:?}");
                assert_eq!(protocols, [protocol], "{what}");
                assert!(!seen.is_empty() && seen.iter().all(|ip| *ip == address), "{what}: {seen:?}");
            }
        }
    }
}

/// An agent that is started again with another flag cuts no connection.
#[test]
fn a_change_of_the_flag_cuts_no_connection() {
    let mut cluster = start("tc", "ipip", [BOTH; 3]);
    let to = Family::BOTH.map(|family| cluster.at(1, family, NODE_PORT));
    let client = cluster.lab.client().netns().clone();
    // So many that some go to each of the two endpoints, and slow enough to leave the processor to
    // the agents that start.
    let held = || HeldConnections::start(&client, &to, 24, Duration::from_millis(60)).unwrap();
    let mut begun = vec![("ipip", held())];
    for dispatch in ["udp", "ipip"] {
        cluster.kill_agents().unwrap();
        let flags = ["--forwarding", "direct", "--dispatch", dispatch];
        cluster.launch(|agent| agent.attach("tc").flags(&flags)).unwrap();
        for family in Family::BOTH {
            let ipip = if family == Family::V4 { IPIP } else { IP6IP6 };
            // Each connection travels as it began. A capture may be shorter than the pauses.
            pace::until("both kinds are seen", Duration::from_secs(10), || {
                let (protocols, _) = reached(&cluster, family, 2);
                [UDP, ipip].iter().all(|kind| protocols.contains(kind))
            });
        }
        begun.push((dispatch, held()));
    }
    for (dispatch, held) in begun {
        let report = held.finish();
        assert!(report.is_clean(), "begun within {dispatch}: {report}");
    }
}
