//! `sessionAffinity: ClientIP` for clients outside the cluster: an address stays with its endpoint.

use std::net::SocketAddr;
use std::thread::sleep;
use std::time::{Duration, Instant};

use serde_json::json;
use traffic_policy_testing::agent::Agent;
use traffic_policy_testing::cluster::{Cluster, Protocol};
use traffic_policy_testing::lab::{Family, Lab};
use traffic_policy_testing::netns::Namespace;
use traffic_policy_testing::object::{Backend, Policy, Service, vip};
use traffic_policy_testing::pace::scaled;
use traffic_policy_testing::traffic::Outcome;

const PORT: u16 = 30_080;
const SHORT: u16 = 30_081;
const SOON: Duration = Duration::from_secs(10);

fn sticky(name: &str, port: u16, seconds: u32) -> Service {
    Cluster::node_port(name, Policy::Cluster, port)
        .spec("sessionAffinity", json!("ClientIP"))
        .spec("sessionAffinityConfig", json!({"clientIP": {"timeoutSeconds": seconds}}))
}

fn pod(from: &Namespace, protocol: Protocol, to: SocketAddr) -> String {
    let outcome = protocol.probe(to).limit(scaled(Duration::from_secs(3))).from(from).unwrap();
    outcome.answer().unwrap_or_else(|error| panic!("{protocol:?} {to}: {error:#}")).pod
}

fn stays_and_leaves_with_its_endpoint(attach: &str) {
    let cluster = Cluster::start(Lab::builder().pods(&[3, 3])).unwrap();
    let lab = &cluster.lab;
    let announced = sticky("web", PORT, 600).announced();
    cluster.manifests.apply(&announced, &cluster.backends()).unwrap();
    let _agents = Agent::start_first(1, lab, |agent| agent.attach(attach)).unwrap();
    for family in Family::BOTH {
        lab.route_vip(vip(family), lab.node(1)).unwrap();
        let node_port = cluster.at(1, family, PORT);
        // TCP and UDP are two ports of the Service, each with an affinity of its own.
        for protocol in Protocol::BOTH {
            let what = format!("{attach} {family:?} {protocol:?}");
            // Each request comes from another port. By chance, 12 requests all get one of 6
            // endpoints once in 10^8 runs.
            let first = pod(lab.client().netns(), protocol, node_port);
            let neighbour = pod(lab.router(), protocol, node_port);
            for _ in 0..12 {
                assert_eq!(pod(lab.client().netns(), protocol, node_port), first, "{what}");
                assert_eq!(pod(lab.router(), protocol, node_port), neighbour, "{what}: another client");
            }
            // All addresses of the Service share the affinity.
            for _ in 0..3 {
                assert_eq!(
                    pod(lab.client().netns(), protocol, SocketAddr::new(vip(family), 80)),
                    first,
                    "{what}"
                );
            }

            // The endpoint leaves: the client gets another one, which it keeps when the first comes
            // back.
            let rest: Vec<_> = lab.pods().filter(|pod| pod.name != first).map(Backend::of).collect();
            cluster.manifests.endpoints(&announced, &rest).unwrap();
            let other =
                |outcome: &Outcome| matches!(outcome, Outcome::Answered(answer) if answer.pod != first);
            cluster.wait_for(protocol, node_port, SOON, other).unwrap();
            let second = pod(lab.client().netns(), protocol, node_port);
            cluster.manifests.endpoints(&announced, &cluster.backends()).unwrap();
            let until = Instant::now() + Duration::from_millis(1500);
            while Instant::now() < until {
                assert_eq!(pod(lab.client().netns(), protocol, node_port), second, "{what}: it comes back");
                sleep(Duration::from_millis(50));
            }
            if first != neighbour {
                let now = pod(lab.router(), protocol, node_port);
                assert_eq!(now, neighbour, "{what}: another client's endpoint left");
            }
        }
    }
}

#[test]
fn stays_and_leaves_with_its_endpoint_by_tc() {
    stays_and_leaves_with_its_endpoint("tc");
}

#[test]
fn stays_and_leaves_with_its_endpoint_by_xdp() {
    stays_and_leaves_with_its_endpoint("xdp");
}

#[test]
fn new_connections_prolong_it_and_silence_ends_it() {
    let cluster = Cluster::start(Lab::builder().pods(&[3, 3])).unwrap();
    let client = cluster.lab.client().netns();
    cluster.manifests.apply(&sticky("short", SHORT, 3), &cluster.backends()).unwrap();
    let _agents = Agent::start_first(1, &cluster.lab, |agent| agent.attach("xdp")).unwrap();
    for family in Family::BOTH {
        let to = cluster.at(1, family, SHORT);
        let first = pod(client, Protocol::Tcp, to);
        // Twice the time-out, with requests all the while.
        let until = Instant::now() + Duration::from_secs(6);
        while Instant::now() < until {
            assert_eq!(pod(client, Protocol::Tcp, to), first, "{family:?}");
            sleep(Duration::from_millis(100));
        }
        // By chance, the same one of 6 is chosen each time once in 10^7 runs.
        let moved = (0..9).any(|_| {
            sleep(Duration::from_millis(3200));
            pod(client, Protocol::Tcp, to) != first
        });
        assert!(moved, "{family:?}: it never ends");
    }
}
