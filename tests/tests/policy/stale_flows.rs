//! Datagrams of a flow follow the endpoints; connections do not.
//!
//! The pods keep answering all the time, so datagrams to a removed endpoint would still be
//! answered.

use std::net::SocketAddr;
use std::time::Duration;

use traffic_policy_testing::agent::Agent;
use traffic_policy_testing::cluster::{Cluster, Protocol};
use traffic_policy_testing::lab::{Family, Lab};
use traffic_policy_testing::object::{Backend, Policy, Service, vip};
use traffic_policy_testing::pace::look_until;
use traffic_policy_testing::traffic::{HeldConnections, Outcome, Probe};

const PORT: u16 = 30_080;
const OTHER_PORT: u16 = 30_090;
const SOURCE_PORT: u16 = 44_444;
const SOON: Duration = Duration::from_secs(15);

fn web(policy: Policy) -> Service {
    Cluster::node_port("web", policy, PORT).announced()
}

/// Sends one datagram of the one flow.
fn ask(cluster: &Cluster, to: SocketAddr) -> Outcome {
    let probe = Probe::udp(to).source_port(SOURCE_PORT).limit(Duration::from_millis(300));
    probe.from(cluster.lab.client().netns()).unwrap()
}

#[track_caller]
fn until(cluster: &Cluster, what: &str, to: SocketAddr, wanted: impl Fn(&Outcome) -> bool) -> Outcome {
    look_until(&format!("{what}, {to}"), SOON, || ask(cluster, to), wanted)
}

fn is_by(outcome: &Outcome, pod: &str) -> bool {
    matches!(outcome, Outcome::Answered(answer) if answer.pod == pod)
}

fn answered(outcome: &Outcome) -> bool {
    matches!(outcome, Outcome::Answered(_))
}

fn follow(attach: &str) {
    let cluster = Cluster::start(Lab::builder().pods(&[1, 1])).unwrap();
    let lab = &cluster.lab;
    let service = web(Policy::Cluster);
    let both = cluster.backends();
    cluster.manifests.apply(&service, &both).unwrap();
    // The pods stay endpoints of another Service all the time.
    cluster.manifests.apply(&Cluster::node_port("other", Policy::Cluster, OTHER_PORT), &both).unwrap();
    let _agents = Agent::start_first(1, lab, |agent| agent.attach(attach)).unwrap();
    let mut ways = Vec::new();
    for family in Family::BOTH {
        lab.route_vip(vip(family), lab.node(1)).unwrap();
        ways.extend([cluster.at(1, family, PORT), SocketAddr::new(vip(family), 80)]);
    }
    for protocol in Protocol::BOTH {
        for to in &ways {
            cluster.ask_until_all(protocol, *to, &["pod-1-1", "pod-2-1"]).unwrap();
        }
    }
    let held = HeldConnections::start(lab.client().netns(), &ways, 16, Duration::from_millis(100)).unwrap();
    let endpoints = |backends: &[Backend]| cluster.manifests.endpoints(&service, backends).unwrap();

    for to in ways.iter().copied() {
        // A flow stays with its endpoint, and moves once its Service no longer has that endpoint.
        let pod = ask(&cluster, to).answer().unwrap().pod;
        for _ in 0..8 {
            assert!(is_by(&ask(&cluster, to), &pod), "{attach} {to}");
        }
        let (stays, other) = if pod == "pod-1-1" { (1, "pod-2-1") } else { (0, "pod-1-1") };
        let kept = SocketAddr::new(to.ip(), OTHER_PORT);
        let kept_by = (to.port() == PORT).then(|| ask(&cluster, kept).answer().unwrap().pod);
        endpoints(&both[stays..=stays]);
        until(&cluster, "its endpoint is gone", to, |outcome| is_by(outcome, other));
        if let Some(pod) = kept_by {
            assert!(is_by(&ask(&cluster, kept), &pod), "{attach} {kept}: of the other Service");
        }
        // A terminating endpoint takes no new flows, but still serves this one.
        let leaving = both[stays].clone().terminating();
        endpoints(&[leaving, both[1 - stays].clone()]);
        let new = |outcome: &Outcome| is_by(outcome, &pod);
        cluster.wait_for(Protocol::Udp, to, SOON, new).unwrap();
        assert!(is_by(&ask(&cluster, to), other), "{attach} {to}: it serves still");
        endpoints(&both);
    }

    // No endpoint is left: refused, although the pod would still answer.
    for to in &ways {
        until(&cluster, "before", *to, answered);
    }
    endpoints(&[]);
    for to in &ways {
        until(&cluster, "no endpoint", *to, |outcome| matches!(outcome, Outcome::Refused(_)));
    }
    endpoints(&both[1..]);
    for to in &ways {
        until(&cluster, "an endpoint again", *to, |outcome| is_by(outcome, "pod-2-1"));
    }

    // The Service is deleted: a node port is then the node's own, and no host has the load
    // balancer's address.
    cluster.manifests.delete(&service).unwrap();
    for to in &ways {
        until(&cluster, "deleted", *to, |outcome| !answered(outcome));
    }
    cluster.manifests.apply(&service, &both[..1]).unwrap();
    for to in &ways {
        until(&cluster, "there again", *to, |outcome| is_by(outcome, "pod-1-1"));
    }

    // Connections have not been affected at any time, each with its pod.
    let report = held.finish();
    assert!(report.broken.is_empty() && report.requests > 0, "{attach}: {report}");
}

#[test]
fn datagrams_follow_and_connections_stay_by_tc() {
    follow("tc");
}

#[test]
fn datagrams_follow_and_connections_stay_by_xdp() {
    follow("xdp");
}
