//! `loadBalancerSourceRanges`: the clients that may use a load balancer's address. Node ports are
//! not restricted by it.

use std::net::SocketAddr;
use std::time::Duration;

use serde_json::json;
use traffic_policy_testing::agent::Agent;
use traffic_policy_testing::cluster::{Cluster, Protocol, TARGET};
use traffic_policy_testing::lab::{Family, Lab};
use traffic_policy_testing::object::{Port, Service, vip};
use traffic_policy_testing::traffic::Outcome;

const NODE_PORT: u16 = 30080;

fn restricted(ranges: &[&str]) -> Service {
    Service::new("restricted")
        .port(Port::tcp(80, TARGET).node_port(NODE_PORT))
        .announced()
        .spec("loadBalancerSourceRanges", json!(ranges))
}

#[test]
fn other_sources_are_dropped() {
    for attach in ["tc", "xdp"] {
        let cluster = Cluster::start(Lab::builder().pods(&[1, 1])).unwrap();
        // The client is 192.0.2.10 in IPv4; no IPv6 range is given, so all IPv6 clients are
        // admitted.
        cluster.manifests.apply(&restricted(&["198.51.100.0/24"]), &cluster.backends()).unwrap();
        let agents = Agent::start_first(1, &cluster.lab, |agent| agent.attach(attach)).unwrap();
        for family in Family::BOTH {
            cluster.lab.route_vip(vip(family), cluster.lab.node(1)).unwrap();
        }
        let ask = |family| cluster.ask(Protocol::Tcp, SocketAddr::new(vip(family), 80)).unwrap();
        assert_eq!(ask(Family::V4), Outcome::Silent, "{attach}");
        assert!(matches!(ask(Family::V6), Outcome::Answered(_)), "{attach}");
        let hook = if attach == "tc" { "tc-ingress" } else { "xdp" };
        assert!(agents[0].packets(hook, "dropped-source-range").unwrap() > 0, "{attach}");
        cluster.answer(Protocol::Tcp, cluster.at(1, Family::V4, NODE_PORT)).unwrap();

        // One more range, not normalized, admits the client; without it the client is rejected
        // again.
        let limit = Duration::from_secs(5);
        let to = SocketAddr::new(vip(Family::V4), 80);
        let answered = |outcome: &Outcome| matches!(outcome, Outcome::Answered(_));
        let service = restricted(&["198.51.100.0/24", "192.0.2.9/29"]);
        cluster.manifests.apply(&service, &cluster.backends()).unwrap();
        cluster.wait_for(Protocol::Tcp, to, limit, answered).unwrap();
        cluster.manifests.apply(&restricted(&["198.51.100.0/24"]), &cluster.backends()).unwrap();
        cluster.wait_for(Protocol::Tcp, to, limit, |outcome| *outcome == Outcome::Silent).unwrap();
    }
}
