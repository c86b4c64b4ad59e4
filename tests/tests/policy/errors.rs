//! ICMP errors from behind a node port: at the client they come from the address to which it sent
//! the request.

use std::time::Duration;

use traffic_policy_testing::agent::Agent;
use traffic_policy_testing::capture::Capture;
use traffic_policy_testing::cluster::{Cluster, Protocol};
use traffic_policy_testing::lab::{Family, Lab};
use traffic_policy_testing::object::{Backend, Policy, Port, Service};
use traffic_policy_testing::pace::{scaled, until};
use traffic_policy_testing::rows;
use traffic_policy_testing::traffic::Outcome;

use crate::icmp::error_about;
use crate::router::datagram;

const REMOTE: u16 = 30080;
const LOCAL: u16 = 30081;
const DEAD_REMOTE: u16 = 30082;
const DEAD_LOCAL: u16 = 30083;

fn start(attach: &str, wire_offloads: bool) -> (Cluster, Vec<Agent>) {
    let cluster = Cluster::start(Lab::builder().pods(&[1, 1]).wire_offloads(wire_offloads)).unwrap();
    for (name, policy, port, dead, number) in
        [("remote", Policy::Cluster, REMOTE, DEAD_REMOTE, 2), ("local", Policy::Local, LOCAL, DEAD_LOCAL, 1)]
    {
        let backend = Backend::of(cluster.lab.node(number).pod(1));
        cluster
            .manifests
            .apply(&Cluster::node_port(name, policy, port), std::slice::from_ref(&backend))
            .unwrap();
        // Nothing listens on port 9.
        let service =
            Service::new(&format!("dead-{name}")).policy(policy).port(Port::udp(80, 9).node_port(dead));
        cluster.manifests.apply(&service, &[backend]).unwrap();
    }
    let agents = Agent::start_first(1, &cluster.lab, |agent| agent.attach(attach)).unwrap();
    (cluster, agents)
}

/// A port on which nothing listens: the client's connected socket gets ECONNREFUSED.
fn dead_port(cluster: &Cluster, attach: &str) {
    for family in Family::BOTH {
        for port in [DEAD_REMOTE, DEAD_LOCAL] {
            let to = cluster.at(1, family, port);
            let capture = Capture::start(cluster.lab.client().netns(), "eth0").unwrap();
            let outcome = Protocol::Udp.probe(to).limit(scaled(Duration::from_secs(3)));
            let outcome = outcome.from(cluster.lab.client().netns()).unwrap();
            assert!(matches!(outcome, Outcome::Refused(_)), "{attach} {to}: {outcome:?}");
            let frames = capture.finish_valid().unwrap();
            let wanted = if family == Family::V4 { (3, 3) } else { (1, 4) };
            assert!(frames.iter().any(|frame| error_about(frame, to) == Some(wanted)), "{attach} {to}");
        }
    }
}

/// The hops of a `traceroute`. The router is the first, node-1 the second; the endpoint comes after
/// `hops` hops, of which those from node-1 on look like the node port itself.
fn traced(cluster: &Cluster, agents: &[Agent], attach: &str) {
    let client = cluster.lab.client().netns();
    for family in Family::BOTH {
        let wanted = if family == Family::V4 { (11, 0) } else { (3, 0) };
        for (port, hops) in [(REMOTE, 3), (LOCAL, 2)] {
            let to = cluster.at(1, family, port);
            // Neighbours are resolved from here on.
            cluster.answer(Protocol::Udp, to).unwrap();
            for ttl in 2..=hops {
                let capture = Capture::start(client, "eth0").unwrap();
                let before = told(agents);
                datagram(client, to, ttl);
                let what = format!("{attach} {to}: a count at hop {ttl}");
                until(&what, Duration::from_secs(5), || told(agents) != before);
                let frames = capture.finish_valid().unwrap();
                let errors: Vec<_> = frames.iter().filter_map(|frame| error_about(frame, to)).collect();
                assert_eq!(errors, [wanted], "{attach} {to} hop {ttl}");
            }
        }
    }
}

/// The number of ICMP errors that node-1 has sent or translated.
fn told(agents: &[Agent]) -> u64 {
    let mut sum = 0;
    for outcome in ["rejected-ttl-exceeded", "replied-icmp-error", "replied-local-icmp-error"] {
        for hook in ["xdp", "tc-ingress", "tc-egress"] {
            sum += agents[0].packets(hook, outcome).unwrap();
        }
    }
    sum
}

fn dead_ports_and_hops(attach: &str, wire_offloads: bool) {
    let (cluster, agents) = start(attach, wire_offloads);
    dead_port(&cluster, attach);
    traced(&cluster, &agents, attach);
}

rows! {
    fn dead_ports_and_hops_by_tc() = dead_ports_and_hops("tc", false);
    fn dead_ports_and_hops_by_tc_with_offloads() = dead_ports_and_hops("tc", true);
    fn dead_ports_and_hops_by_xdp() = dead_ports_and_hops("xdp", false);
}
