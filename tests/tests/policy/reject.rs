//! Requests without an endpoint: refused at once if there is none anywhere, dropped if there is
//! none on this node (Local). A load balancer that has not noticed yet tries another node after
//! silence; a refusal would reach its client.

use std::net::SocketAddr;
use std::time::Duration;

use traffic_policy_testing::agent::Agent;
use traffic_policy_testing::capture::{Capture, Frame};
use traffic_policy_testing::cluster::{Cluster, Protocol};
use traffic_policy_testing::lab::{Family, Lab};
use traffic_policy_testing::object::{Backend, Policy};
use traffic_policy_testing::pace::scaled;
use traffic_policy_testing::rows;
use traffic_policy_testing::traffic::Outcome;

use crate::icmp::{error_about, is_to};

const NOWHERE_CLUSTER: u16 = 30080;
const NOWHERE_LOCAL: u16 = 30081;
const UNREADY: u16 = 30082;
const ELSEWHERE: u16 = 30083;

fn refused_or_silent(attach: &str, wire_offloads: bool) {
    let cluster = Cluster::start(Lab::builder().pods(&[0, 1]).wire_offloads(wire_offloads)).unwrap();
    let pod = Backend::of(cluster.lab.node(2).pod(1));
    for (name, policy, port, backends) in [
        ("nowhere-cluster", Policy::Cluster, NOWHERE_CLUSTER, vec![]),
        // Policy Local makes no difference as long as no node has an endpoint.
        ("nowhere-local", Policy::Local, NOWHERE_LOCAL, vec![]),
        ("unready", Policy::Cluster, UNREADY, vec![pod.clone().not_ready()]),
        ("elsewhere", Policy::Local, ELSEWHERE, vec![pod.clone()]),
    ] {
        cluster.manifests.apply(&Cluster::node_port(name, policy, port), &backends).unwrap();
    }
    let agents = Agent::start_first(1, &cluster.lab, |agent| agent.attach(attach)).unwrap();
    for family in Family::BOTH {
        for protocol in Protocol::BOTH {
            let what = format!("{attach} {family:?} {protocol:?}");
            for port in [NOWHERE_CLUSTER, NOWHERE_LOCAL, UNREADY] {
                let to = cluster.at(1, family, port);
                let capture = Capture::start(cluster.lab.client().netns(), "eth0").unwrap();
                let probe = protocol.probe(to).limit(scaled(Duration::from_secs(3)));
                let outcome = probe.from(cluster.lab.client().netns()).unwrap();
                // The client's kernel does not deliver an ICMPv6 error that arrives before
                // connect() has released the socket, which happens where the wire has no delay: it
                // gives up at the second SYN.
                let twice = family == Family::V6 && protocol == Protocol::Tcp;
                let refused = matches!(outcome, Outcome::Refused(_)) && twice || outcome.is_refused_at_once();
                assert!(refused, "{what} {port}: {outcome:?}");
                each_request_is_refused(&capture.finish_valid().unwrap(), to, &what);
            }
            let silent = cluster.ask(protocol, cluster.at(1, family, ELSEWHERE)).unwrap();
            assert_eq!(silent, Outcome::Silent, "{what}");
        }
    }
    let packets = |hook, outcome| agents[0].packets(hook, outcome).unwrap();
    // XDP leaves the packet to TC if the frame has no room for the answer.
    assert!(packets("xdp", "rejected-no-endpoint") + packets("tc-ingress", "rejected-no-endpoint") >= 12);
    let hook = if attach == "tc" { "tc-ingress" } else { "xdp" };
    assert!(packets(hook, "rejected-no-endpoint") > 0);
    assert!(packets(hook, "dropped-no-local-endpoint") >= 4);
}

/// Checks that the error about each packet of the client follows it directly: the answer is
/// immediate.
fn each_request_is_refused(frames: &[Frame], to: SocketAddr, what: &str) {
    let wanted = if to.is_ipv4() { (3, 3) } else { (1, 4) };
    let concerned: Vec<_> =
        frames.iter().filter(|frame| is_to(frame, to) || error_about(frame, to).is_some()).collect();
    assert!(!concerned.is_empty(), "{what}: no request");
    for pair in concerned.chunks(2) {
        let [request, answer] = pair else { panic!("{what}: no answer to {}", pair[0]) };
        assert!(is_to(request, to), "{what}: {request}");
        assert_eq!(error_about(answer, to), Some(wanted), "{what}: {answer}");
    }
}

rows! {
    fn tc() = refused_or_silent("tc", false);
    fn tc_with_offloads() = refused_or_silent("tc", true);
    fn native_xdp() = refused_or_silent("xdp", false);
    fn generic_xdp() = refused_or_silent("xdp-generic", false);
}

#[test]
fn follows_the_endpoints() {
    let cluster = Cluster::start(Lab::builder().pods(&[1, 1])).unwrap();
    let web = Cluster::node_port("web", Policy::Local, ELSEWHERE);
    let pods = cluster.backends();
    cluster.manifests.apply(&web, &pods).unwrap();
    let _agents = Agent::start_first(1, &cluster.lab, |agent| agent.attach("xdp")).unwrap();
    let to = cluster.at(1, Family::V4, ELSEWHERE);
    let (tcp, soon) = (Protocol::Tcp, Duration::from_secs(5));
    assert_eq!(cluster.answer(tcp, to).unwrap().pod, "pod-1-1");
    // The last local endpoint goes, the last of all goes, and the first comes back.
    cluster.manifests.endpoints(&web, &pods[1..]).unwrap();
    cluster.wait_for(tcp, to, soon, |outcome| *outcome == Outcome::Silent).unwrap();
    cluster.manifests.endpoints(&web, &[]).unwrap();
    cluster.wait_for(tcp, to, soon, Outcome::is_refused_at_once).unwrap();
    cluster.manifests.endpoints(&web, &pods).unwrap();
    cluster.wait_for(tcp, to, soon, |outcome| matches!(outcome, Outcome::Answered(_))).unwrap();
    // The Service itself is removed: the port is then the node's own, and nothing listens on it.
    cluster.manifests.delete(&web).unwrap();
    cluster.wait_for(tcp, to, soon, Outcome::is_refused_at_once).unwrap();
}
