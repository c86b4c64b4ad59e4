//! Datagrams whose fragments fit the client's link, but not the outer packets between the nodes.
//! Those of IPv4 are sent in pieces at once; clients of IPv6 are told the length that fits.

use traffic_policy_testing::cluster::Cluster;
use traffic_policy_testing::lab::{Family, Lab};
use traffic_policy_testing::object::lease;

use super::{NODE_PORT, service};
use crate::fragments::echo;

/// The last is the longest one that fits the client's link in one packet: that has DF, so that the
/// client is told what fits, and cuts others shorter from then on.
const LENGTHS: [usize; 5] = [1473, 2000, 4096, 20_000, 1472];

fn pass(attach: &str, forwarding: &str, dispatch: &str) {
    let mut cluster = Cluster::start(Lab::builder().pods(&[0, 1])).unwrap();
    let nodes = cluster.lab.nodes();
    let leases: Vec<_> = nodes.iter().map(|node| lease::tunnels(node, &Family::BOTH, "ipip,udp")).collect();
    cluster.manifests.write("leases", &leases).unwrap();
    cluster.manifests.apply(&service(), &cluster.backends()).unwrap();
    let flags = ["--forwarding", forwarding, "--dispatch", dispatch];
    cluster.launch(|agent| agent.attach(attach).flags(&flags)).unwrap();
    for family in Family::BOTH {
        let (client, to) = (&cluster.lab.client(), cluster.at(1, family, NODE_PORT));
        for length in LENGTHS {
            let answer = echo(client.netns(), to, length);
            let seen = (answer.pod.as_str(), answer.client.ip());
            assert_eq!(seen, ("pod-2-1", client.address(family)), "{attach} {family:?} {length}");
        }
        if family == Family::V4 {
            let dropped = cluster.agents[0].packets("tc-ingress", "dropped-mtu-exceeded").unwrap();
            assert_eq!(dropped, 0, "{attach} {forwarding} within {dispatch}");
        }
    }
}

#[test]
fn pass_within_ip_by_tc() {
    pass("tc", "direct", "ipip");
}

#[test]
fn pass_within_udp_by_xdp() {
    pass("xdp", "direct", "udp");
}

#[test]
fn pass_both_ways_within_udp_by_tc() {
    pass("tc", "tunnel", "udp");
}
