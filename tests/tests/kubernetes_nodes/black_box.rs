//! Black-box checks of node ports from outside.

use std::net::SocketAddr;
use std::time::Duration;

use traffic_policy_testing::lab::{Family, Lab, Node};
use traffic_policy_testing::pace;
use traffic_policy_testing::traffic::{Outcome, Probe, http};

pub const POD_PORT: u16 = 8080;

/// Sends one request to a node port.
pub fn ask(lab: &Lab, node: &Node, family: Family, udp: bool, port: u16) -> Outcome {
    probe(node, family, udp, port).from(lab.client().netns()).unwrap()
}

fn probe(node: &Node, family: Family, udp: bool, port: u16) -> Probe {
    let to = SocketAddr::new(node.address(family), port);
    if udp { Probe::udp(to) } else { Probe::tcp(to) }
}

/// Calls `check` for TCP and UDP of both families.
pub fn each(mut check: impl FnMut(Family, bool)) {
    for family in Family::BOTH {
        for udp in [false, true] {
            check(family, udp);
        }
    }
}

/// Checks that every node answers, and that each of `pods` gets a request.
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

/// Checks that nodes with pods answer by their own ones, which see the client, and that the others
/// are silent.
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

/// Checks the health port of a Service: 200 on nodes with its pods, otherwise 503.
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

/// Waits until the agents have caught up and the condition holds.
#[track_caller]
pub fn until(what: &str, condition: impl FnMut() -> bool) {
    pace::until(what, Duration::from_secs(20), condition);
}
