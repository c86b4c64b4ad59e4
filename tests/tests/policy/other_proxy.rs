//! A Service that another proxy serves: its ClusterIP is within the ranges of ClusterIPs, but is
//! not unallocated.

use serde_json::json;
use traffic_policy_testing::agent::Agent;
use traffic_policy_testing::cluster::{Cluster, Protocol, TARGET};
use traffic_policy_testing::lab::{Family, Lab};
use traffic_policy_testing::object::{Port, Service};
use traffic_policy_testing::traffic::Outcome;

/// Checks that packets to it pass to the stack unchanged, while those to an unallocated address are
/// dropped.
fn passes(attach: &str) {
    let cluster = Cluster::start(Lab::builder().pods(&[1])).unwrap();
    let service = Service::new("mesh").only_cluster_ip().port(Port::tcp(80, TARGET));
    let addresses = ["10.96.0.3".parse().unwrap(), "fd00:10:96::3".parse().unwrap()];
    let service = addresses.iter().fold(service, |service, address| service.cluster_ip(*address));
    let mut object = service.object();
    object["metadata"]["labels"] = json!({"service.kubernetes.io/service-proxy-name": "mesh"});
    cluster.manifests.write("mesh", &[object]).unwrap();
    let flags = ["--service-cidr", "10.96.0.0/16,fd00:10:96::/112"];
    let agents = Agent::start_all(&cluster.lab, |agent| agent.attach(attach).flags(&flags)).unwrap();
    let client = cluster.lab.client().netns();
    for (family, to, nobodys) in [
        (Family::V4, "10.96.0.3:80", "10.96.0.4:80"),
        (Family::V6, "[fd00:10:96::3]:80", "[fd00:10:96::4]:80"),
    ] {
        let dropped = || -> u64 {
            let hooks = ["xdp", "tc-ingress"].iter();
            hooks.map(|hook| agents[0].packets(hook, "dropped-unallocated-cluster-ip").unwrap()).sum()
        };
        for address in [to, nobodys] {
            let address: std::net::SocketAddr = address.parse().unwrap();
            cluster.lab.route_vip(address.ip(), cluster.lab.node(1)).unwrap();
        }
        let before = dropped();
        // The stack may report that it has no route.
        let outcome = Protocol::Tcp.probe(to.parse().unwrap()).from(client);
        assert!(!matches!(outcome, Ok(Outcome::Answered(_))), "{to}: nothing serves it here");
        assert_eq!(dropped(), before, "{family:?} {to}");
        let nobody = Protocol::Tcp.probe(nobodys.parse().unwrap()).from(client).unwrap();
        assert_eq!(nobody, Outcome::Silent);
        assert!(dropped() > before, "{family:?} {nobodys}: the control did not reach the node");
    }
}

#[test]
fn what_another_proxy_serves_passes_tc() {
    passes("tc");
}

#[test]
fn what_another_proxy_serves_passes_xdp() {
    passes("xdp");
}
