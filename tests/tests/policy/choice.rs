//! The endpoints among which a node chooses: hints by zone and by node, endpoints named by several
//! slices, pods that are published before they are ready.

use std::slice;
use std::time::Duration;

use serde_json::{Value, json};
use traffic_policy_testing::agent::Agent;
use traffic_policy_testing::cluster::{Cluster, Protocol};
use traffic_policy_testing::lab::{Family, Lab};
use traffic_policy_testing::object::{Backend, Policy, Service, node};
use traffic_policy_testing::pace::look_until;
use traffic_policy_testing::traffic::Outcome;

const CLUSTER: u16 = 30_080;
const LOCAL: u16 = 30_081;
const SOON: Duration = Duration::from_secs(10);

/// Sets the zone of each node, in order.
fn set_zones(cluster: &Cluster, zones: &[&str]) {
    let nodes = cluster.lab.nodes().iter().zip(zones).map(|(lab_node, zone)| {
        let mut object = node::object(lab_node);
        object["metadata"]["labels"]["topology.kubernetes.io/zone"] = json!(zone);
        object
    });
    cluster.manifests.write("nodes", &nodes.collect::<Vec<_>>()).unwrap();
}

/// Writes the slices of a Service with a hint for each endpoint, in order; an empty string is no
/// hint.
fn set_hints(cluster: &Cluster, service: &Service, kind: &str, hints: &[&str]) {
    let mut slices = service.slices(&cluster.backends());
    for slice in &mut slices {
        let endpoints = slice["endpoints"].as_array_mut().unwrap();
        for (endpoint, hint) in endpoints.iter_mut().zip(hints).filter(|(_, hint)| !hint.is_empty()) {
            endpoint["hints"] = json!({kind: [{"name": hint}]});
        }
    }
    write_slices(cluster, service, &slices);
}

fn write_slices(cluster: &Cluster, service: &Service, slices: &[Value]) {
    cluster.manifests.write(&format!("endpoints-default-{}", service.name()), slices).unwrap();
}

/// Waits until each node is answered by exactly these pods.
fn expect(cluster: &Cluster, what: &str, wanted: &[&[&str]]) {
    for (number, pods) in (1..).zip(wanted) {
        for family in Family::BOTH {
            let to = cluster.at(number, family, CLUSTER);
            // The change is applied once no other pod answers for a while.
            let settled = |_: &Outcome| {
                (0..12).all(|_| pods.contains(&cluster.answer(Protocol::Tcp, to).unwrap().pod.as_str()))
            };
            cluster
                .wait_for(Protocol::Tcp, to, SOON, settled)
                .unwrap_or_else(|error| panic!("{what}: {error:#}"));
            for protocol in Protocol::BOTH {
                // If the change only adds pods, only their answers show that it is applied.
                let ask = || cluster.ask_until_all(protocol, to, pods);
                look_until(&format!("{what}: all pods by node-{number}"), SOON, ask, Result::is_ok).unwrap();
            }
        }
    }
}

#[test]
fn hints_by_zone_and_by_node() {
    let cluster = Cluster::start(Lab::builder().pods(&[1, 1, 1])).unwrap();
    let service = Cluster::node_port("web", Policy::Cluster, CLUSTER);
    let local = Cluster::node_port("local", Policy::Local, LOCAL);
    set_zones(&cluster, &["a", "b", "b"]);
    cluster.manifests.service(&service).unwrap();
    cluster.manifests.service(&local).unwrap();
    set_hints(&cluster, &service, "forZones", &["a", "b", "b"]);
    // Hints never narrow the choice of policy Local.
    set_hints(&cluster, &local, "forZones", &["b", "a", "a"]);
    let _agents = Agent::start_all(&cluster.lab, |agent| agent.attach("tc")).unwrap();
    let [one, two, three] = ["pod-1-1", "pod-2-1", "pod-3-1"];
    let all: &[&str] = &[one, two, three];
    expect(&cluster, "by zone", &[&[one], &[two, three], &[two, three]]);
    let to = |number| cluster.at(number, Family::V4, LOCAL);
    let answered: Vec<_> =
        (1..=3).map(|number| cluster.answer(Protocol::Tcp, to(number)).unwrap().pod).collect();
    assert_eq!(answered, all, "policy Local");

    // The node moves to another zone.
    set_zones(&cluster, &["b", "b", "b"]);
    expect(&cluster, "another zone", &[&[two, three], &[two, three], &[two, three]]);
    // No endpoint is for this zone: the hints are then ignored there.
    set_zones(&cluster, &["c", "b", "b"]);
    expect(&cluster, "a zone without endpoints", &[all, &[two, three], &[two, three]]);
    // An endpoint without a hint disables them.
    set_hints(&cluster, &service, "forZones", &["a", "", "b"]);
    expect(&cluster, "one without a hint", &[all, all, all]);
    set_hints(&cluster, &service, "forNodes", &["node-1", "node-1", "node-2"]);
    expect(&cluster, "by node", &[&[one, two], &[three], all]);
}

/// While an endpoint moves from one slice to another, both contain it for a moment, and only one
/// may know its node.
#[test]
fn endpoints_of_several_slices_count_once() {
    let cluster = Cluster::start(Lab::builder().pods(&[1, 1])).unwrap();
    let [one, two] = [1, 2].map(|number| Backend::of(cluster.lab.node(number).pod(1)));
    let services = [
        Cluster::node_port("web", Policy::Cluster, CLUSTER),
        Cluster::node_port("local", Policy::Local, LOCAL),
    ];
    let write = |parts: &[&[Backend]]| {
        for service in &services {
            let mut all = Vec::new();
            for (number, backends) in parts.iter().enumerate() {
                for mut slice in service.slices(backends) {
                    let name = format!("{}-{number}", slice["metadata"]["name"].as_str().unwrap());
                    slice["metadata"]["name"] = json!(name);
                    all.push(slice);
                }
            }
            write_slices(&cluster, service, &all);
        }
    };
    for service in &services {
        cluster.manifests.service(service).unwrap();
    }
    write(&[
        &[one.clone().without_node(), two.clone()],
        slice::from_ref(&one),
        &[one.clone().without_node()],
    ]);
    let _agents = Agent::start_all(&cluster.lab, |agent| agent.attach("xdp")).unwrap();
    for family in Family::BOTH {
        // One of two, not three of four: 400 of 800, with a standard deviation of 14.
        let asked = (0..800).map(|_| cluster.answer(Protocol::Udp, cluster.at(2, family, CLUSTER)).unwrap());
        let first = asked.filter(|answer| answer.pod == "pod-1-1").count();
        assert!((320..480).contains(&first), "{family:?}: {first} of 800");
        // The slice that knows the node decides.
        let answer = cluster.answer(Protocol::Tcp, cluster.at(1, family, LOCAL)).unwrap();
        assert_eq!(answer.pod, "pod-1-1", "{family:?}");
    }
    // The endpoint leaves one of its slices, and then the last: only that removes it.
    write(&[slice::from_ref(&two), &[one]]);
    cluster
        .ask_until_all(Protocol::Tcp, cluster.at(2, Family::V4, CLUSTER), &["pod-1-1", "pod-2-1"])
        .unwrap();
    write(&[&[two], &[]]);
    let to = cluster.at(1, Family::V4, LOCAL);
    cluster.wait_for(Protocol::Tcp, to, SOON, |outcome| *outcome == Outcome::Silent).unwrap();
    cluster.ask_until_all(Protocol::Tcp, cluster.at(1, Family::V4, CLUSTER), &["pod-2-1"]).unwrap();
}

/// `publishNotReadyAddresses` is evaluated by the control plane: it marks such pods ready, whatever
/// else they are.
#[test]
fn pods_published_before_they_are_ready() {
    let cluster = Cluster::start(Lab::builder().pods(&[1, 1])).unwrap();
    let [one, two] = [1, 2].map(|number| Backend::of(cluster.lab.node(number).pod(1)));
    let services = [
        Cluster::node_port("web", Policy::Cluster, CLUSTER).spec("publishNotReadyAddresses", json!(true)),
        Cluster::node_port("local", Policy::Local, LOCAL).spec("publishNotReadyAddresses", json!(true)),
    ];
    let published = [one.clone().conditions(true, false, true), two.clone().conditions(true, false, false)];
    for service in &services {
        cluster.manifests.apply(service, &published).unwrap();
    }
    let _agents = Agent::start_first(1, &cluster.lab, |agent| agent.attach("tc")).unwrap();
    for family in Family::BOTH {
        for protocol in Protocol::BOTH {
            cluster.ask_until_all(protocol, cluster.at(1, family, CLUSTER), &["pod-1-1", "pod-2-1"]).unwrap();
            let answer = cluster.answer(protocol, cluster.at(1, family, LOCAL)).unwrap();
            assert_eq!(answer.pod, "pod-1-1", "{family:?} {protocol:?}");
        }
    }
    // A pod that the control plane does not mark ready is not used, whatever the Service demands.
    for service in &services {
        cluster.manifests.endpoints(service, &[one.clone().not_ready(), two.clone()]).unwrap();
    }
    let to = cluster.at(1, Family::V4, LOCAL);
    cluster.wait_for(Protocol::Tcp, to, SOON, |outcome| *outcome == Outcome::Silent).unwrap();
    for _ in 0..12 {
        assert_eq!(cluster.answer(Protocol::Tcp, cluster.at(1, Family::V6, CLUSTER)).unwrap().pod, "pod-2-1");
    }
}
