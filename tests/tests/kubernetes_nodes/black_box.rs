//! A node port seen from outside.

use std::net::SocketAddr;
use std::time::Duration;

use traffic_policy_testing::lab::{Family, Lab, Node};
use traffic_policy_testing::pace;
use traffic_policy_testing::traffic::{Outcome, Probe, http};

pub const POD_PORT: u16 = 8080;

/// One question to a node port.
pub fn ask(lab: &Lab, node: &Node, family: Family, udp: bool, port: u16) -> Outcome {
    probe(node, family, udp, port).from(lab.client().netns()).unwrap()
}

fn probe(node: &Node, family: Family, udp: bool, port: u16) -> Probe {
    let to = SocketAddr::new(node.address(family), port);
    if udp { Probe::udp(to) } else { Probe::tcp(to) }
}

/// TCP and UDP of both families.
pub fn each(mut check: impl FnMut(Family, bool)) {
    for family in Family::BOTH {
        for udp in [false, true] {
            check(family, udp);
        }
    }
}

/// Every node answers, and each of `pods` is asked.
pub fn check_cluster(lab: &Lab, port: u16, pods: &[&str]) {
    each(|family, udp| {
        for node in lab.nodes() {
            let asked = |_| probe(node, family, udp, port).answer(lab.client().netns()).unwrap().pod;
            let mut answered: Vec<String> = (0..30).map(asked).collect();
            answered.sort();
            answered.dedup();
            assert_eq!(answered, pods, "{family:?} udp={udp} {}", node.name);
        }
    });
}

/// Nodes with pods answer by their own ones, which see the client; the others are silent.
pub fn check_local(lab: &Lab, port: u16) {
    each(|family, udp| {
        for node in lab.nodes() {
            let what = format!("{family:?} udp={udp} {}", node.name);
            if node.pods.is_empty() {
                assert_eq!(ask(lab, node, family, udp, port), Outcome::Silent, "{what}");
            } else {
                let answer = probe(node, family, udp, port).answer(lab.client().netns()).unwrap();
                assert_eq!(answer.node, node.name, "{what}");
                assert_eq!(answer.client.ip(), lab.client().address(family), "{what}");
            }
        }
    });
}

/// The health port of a Service: 200 where its pods are, else 503.
pub fn check_health(lab: &Lab, port: u16) {
    for node in lab.nodes() {
        for family in Family::BOTH {
            let server = SocketAddr::new(node.address(family), port);
            let response = http::get_from(lab.client().netns(), server, "/healthz").unwrap();
            let wanted = if node.pods.is_empty() { 503 } else { 200 };
            assert_eq!(response.status, wanted, "{} {family:?}: {}", node.name, response.body);
        }
    }
}

/// Waits until something holds; it is what the agents will do soon.
#[track_caller]
pub fn until(what: &str, condition: impl FnMut() -> bool) {
    pace::until(what, Duration::from_secs(20), condition);
}
