//! Endpoints that are not ordinary ready pods: terminating, without a node, in the host's network.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use traffic_policy_testing::agent::Agent;
use traffic_policy_testing::cluster::{Cluster, Protocol, TARGET};
use traffic_policy_testing::lab::{Addresses, Family, Lab};
use traffic_policy_testing::object::{Backend, Policy, Port, Service};
use traffic_policy_testing::pace::until;
use traffic_policy_testing::traffic::server::Identity;
use traffic_policy_testing::traffic::{Faults, Outcome, Server};

const CLUSTER: u16 = 30080;
const LOCAL: u16 = 30081;
const SOON: Duration = Duration::from_secs(5);

fn both_policies(cluster: &Cluster, backends: &[Backend]) {
    for (name, policy, port) in [("cluster", Policy::Cluster, CLUSTER), ("local", Policy::Local, LOCAL)] {
        cluster.manifests.apply(&Cluster::node_port(name, policy, port), backends).unwrap();
    }
}

#[test]
fn terminating_endpoints_serve_where_no_other_does() {
    let cluster = Cluster::start(Lab::builder().pods(&[1, 1])).unwrap();
    let [leaving, ready] = [1, 2].map(|number| Backend::of(cluster.lab.node(number).pod(1)));
    both_policies(&cluster, &[leaving.clone().terminating(), ready.clone()]);
    let _agents = Agent::start_first(1, &cluster.lab, |agent| agent.attach("xdp")).unwrap();
    for family in Family::BOTH {
        for protocol in Protocol::BOTH {
            let what = format!("{family:?} {protocol:?}");
            // The two lists are chosen separately: Cluster has a ready endpoint, Local on node-1
            // only the terminating one.
            for _ in 0..8 {
                let answer = cluster.answer(protocol, cluster.at(1, family, CLUSTER)).unwrap();
                assert_eq!(answer.pod, "pod-2-1", "{what}");
            }
            let answer = cluster.answer(protocol, cluster.at(1, family, LOCAL)).unwrap();
            assert_eq!(answer.pod, "pod-1-1", "{what}");
        }
    }
    // Once the ready one terminates as well, Cluster uses both.
    both_policies(&cluster, &[leaving.clone().terminating(), ready.clone().terminating()]);
    let to = cluster.at(1, Family::V4, CLUSTER);
    let by_first =
        |outcome: &Outcome| matches!(outcome, Outcome::Answered(answer) if answer.pod == "pod-1-1");
    cluster.wait_for(Protocol::Tcp, to, SOON, by_first).unwrap();
    cluster.ask_until_all(Protocol::Tcp, to, &["pod-1-1", "pod-2-1"]).unwrap();
    // An endpoint that no longer serves is not used, even if it is the last.
    both_policies(&cluster, &[leaving.conditions(false, false, true), ready.conditions(false, false, true)]);
    cluster.wait_for(Protocol::Tcp, to, SOON, Outcome::is_refused_at_once).unwrap();
    let local = cluster.at(1, Family::V4, LOCAL);
    cluster.wait_for(Protocol::Tcp, local, SOON, Outcome::is_refused_at_once).unwrap();
}

/// An endpoint without a node counts for no node's policy and health, but on its own node the
/// packets must not get our own address as source: that would be a martian.
fn without_node(attach: &str) {
    let cluster = Cluster::start(Lab::builder().pods(&[1, 0]).strict_rp_filter()).unwrap();
    let lab = &cluster.lab;
    both_policies(&cluster, &[Backend::of(lab.node(1).pod(1)).without_node()]);
    let _agents = Agent::start_all(lab, |agent| agent.attach(attach)).unwrap();
    for family in Family::BOTH {
        for protocol in Protocol::BOTH {
            let seen =
                |number| cluster.answer(protocol, cluster.at(number, family, CLUSTER)).unwrap().client.ip();
            assert_eq!(seen(1), lab.client().address(family), "{attach} {family:?} {protocol:?}");
            assert_eq!(seen(2), lab.node(2).address(family), "{attach} {family:?} {protocol:?}");
            for number in [1, 2] {
                let outcome = cluster.ask(protocol, cluster.at(number, family, LOCAL)).unwrap();
                assert_eq!(outcome, Outcome::Silent, "{attach} {family:?} {protocol:?} node-{number}");
            }
        }
    }
}

#[test]
fn an_endpoint_without_node_by_tc() {
    without_node("tc");
}

#[test]
fn an_endpoint_without_node_by_xdp() {
    without_node("xdp");
}

fn host_network(attach: &str) {
    let cluster = Cluster::start(Lab::builder().pods(&[0, 0])).unwrap();
    let lab = &cluster.lab;
    let node = lab.node(1);
    let host = Identity { pod: "host".to_owned(), node: node.name.clone() };
    let _server = Server::start_in(node.netns(), TARGET, host, Faults::default(), &cluster.ledger).unwrap();
    both_policies(&cluster, &[Backend::at(&node.addresses).on_node(&node.name)]);
    // The target has the number of the node port itself: a delivered packet must not be taken for a
    // new request.
    let same = 30082;
    let host = Identity { pod: "same".to_owned(), node: node.name.clone() };
    let _same = Server::start_in(node.netns(), same, host, Faults::default(), &cluster.ledger).unwrap();
    let service = Cluster::node_port("same", Policy::Cluster, same).spec("ports", ports_to(same));
    let mut slices = service.slices(&[Backend::at(&node.addresses).on_node(&node.name)]);
    for slice in &mut slices {
        for port in slice["ports"].as_array_mut().unwrap() {
            port["port"] = same.into();
        }
    }
    cluster.manifests.service(&service).unwrap();
    cluster.manifests.write("endpoints-same", &slices).unwrap();
    let _agents = Agent::start_all(lab, |agent| agent.attach(attach)).unwrap();
    for family in Family::BOTH {
        for protocol in Protocol::BOTH {
            let what = format!("{attach} {family:?} {protocol:?}");
            for port in [CLUSTER, LOCAL, same] {
                let answer = cluster.answer(protocol, cluster.at(1, family, port)).unwrap();
                assert_eq!(answer.client.ip(), lab.client().address(family), "{what} {port}");
            }
            for port in [CLUSTER, same] {
                let answer = cluster.answer(protocol, cluster.at(2, family, port)).unwrap();
                assert_eq!(answer.client.ip(), lab.node(2).address(family), "{what} {port}");
            }
            assert_eq!(
                cluster.ask(protocol, cluster.at(2, family, LOCAL)).unwrap(),
                Outcome::Silent,
                "{what}"
            );
        }
    }
}

fn ports_to(port: u16) -> serde_json::Value {
    let one = |protocol: &str| {
        let name = format!("{}-80", protocol.to_lowercase());
        serde_json::json!({"name": name, "protocol": protocol, "port": 80, "targetPort": port, "nodePort": port})
    };
    serde_json::json!([one("TCP"), one("UDP")])
}

#[test]
fn the_host_itself_by_tc() {
    host_network("tc");
}

#[test]
fn the_host_itself_by_xdp() {
    host_network("xdp");
}

/// The slots of a list are written many at a time, into another range with each change.
#[test]
fn a_list_of_ten_thousand_endpoints_is_written_whole() {
    let cluster = Cluster::start(Lab::builder().pods(&[1])).unwrap();
    let addresses = |i: u16, other: u8| {
        let [high, low] = i.to_be_bytes();
        let v6 = Ipv6Addr::new(0xfd64, other.into(), 0, 0, 0, 0, 0, i);
        Addresses { v4: Ipv4Addr::new(100, 64 + other, high, low), v6 }
    };
    let mut list: Vec<Addresses> = (0..10_000).map(|i| addresses(i, 0)).collect();
    let service = Service::new("long").port(Port::tcp(80, TARGET).node_port(CLUSTER));
    let write = |list: &[Addresses]| {
        let backends: Vec<_> = list.iter().map(Backend::at).collect();
        cluster.manifests.apply(&service, &backends).unwrap();
    };
    write(&list);
    let agents = Agent::start_all(&cluster.lab, |agent| agent.attach("tc")).unwrap();
    let held = || {
        let services = agents[0].json(&["services", "default/long"]).unwrap();
        let ports = services.as_array().unwrap().iter();
        let mut held: Vec<String> = ports
            .flat_map(|port| port["endpoints"].as_array().unwrap())
            .map(|endpoint| endpoint["address"].as_str().unwrap().to_owned())
            .collect();
        held.sort();
        held
    };
    let wanted = |list: &[Addresses]| {
        let ips = list.iter().flat_map(|addresses| Family::BOTH.map(|family| addresses.of(family)));
        let mut wanted: Vec<String> = ips.map(|ip| SocketAddr::new(ip, TARGET).to_string()).collect();
        wanted.sort();
        wanted
    };
    until("the list", SOON, || held() == wanted(&list));
    // One endpoint changes, and the whole list is written into another range.
    list[5_000] = addresses(5_000, 1);
    write(&list);
    until("the other list", SOON, || held() == wanted(&list));
    // The slots of a short list are written one by one.
    list.truncate(3);
    write(&list);
    until("a short list", SOON, || held() == wanted(&list));
}
