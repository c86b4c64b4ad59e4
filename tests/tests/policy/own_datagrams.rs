//! A process of the node sends requests from a UDP port that is also a node port, as a resolver
//! does to its upstream: it gets the answers, and clients of the Service are served from the same
//! port all the while.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::time::Duration;

use traffic_policy_testing::agent::Agent;
use traffic_policy_testing::cluster::{Cluster, Protocol};
use traffic_policy_testing::lab::{Family, Lab};
use traffic_policy_testing::netns::Namespace;
use traffic_policy_testing::object::Policy;
use traffic_policy_testing::pace::scaled;

const PORT: u16 = 30_080;
/// The port of the server to which the node sends.
const UPSTREAM: u16 = 5353;

fn bound(namespace: &Namespace, family: Family, port: u16) -> UdpSocket {
    let any: IpAddr = match family {
        Family::V4 => Ipv4Addr::UNSPECIFIED.into(),
        Family::V6 => Ipv6Addr::UNSPECIFIED.into(),
    };
    let socket = namespace.run(|| UdpSocket::bind((any, port))).unwrap();
    socket.set_read_timeout(Some(scaled(Duration::from_secs(5)))).unwrap();
    socket
}

fn answers_are_the_nodes(attach: &str) {
    let cluster = Cluster::start(Lab::builder().pods(&[1, 1])).unwrap();
    let lab = &cluster.lab;
    cluster.manifests.apply(&Cluster::node_port("web", Policy::Cluster, PORT), &cluster.backends()).unwrap();
    let _agents = Agent::start_first(1, lab, |agent| agent.attach(attach)).unwrap();
    for family in Family::BOTH {
        let node_port = cluster.at(1, family, PORT);
        let upstream = bound(lab.client().netns(), family, UPSTREAM);
        let resolver = bound(lab.node(1).netns(), family, PORT);
        for turn in 0..3 {
            let what = format!("{attach} {family:?}, question {turn}");
            // Clients of the Service are served from the same port meanwhile.
            cluster.ask_until_all(Protocol::Udp, node_port, &["pod-1-1", "pod-2-1"]).unwrap();
            let question = format!("question {turn}");
            let to = SocketAddr::new(lab.client().address(family), UPSTREAM);
            resolver.send_to(question.as_bytes(), to).unwrap();
            let mut buffer = [0; 512];
            let (length, from) = upstream.recv_from(&mut buffer).unwrap();
            assert_eq!((&buffer[..length], from), (question.as_bytes(), node_port), "{what}");
            upstream.send_to(b"answer", from).unwrap();
            let (length, from) = resolver.recv_from(&mut buffer).unwrap_or_else(|error| {
                panic!("{what}: no answer: {error}");
            });
            assert_eq!((&buffer[..length], from), (&b"answer"[..], to), "{what}");
        }
    }
}

#[test]
fn by_tc() {
    answers_are_the_nodes("tc");
}

#[test]
fn by_xdp() {
    answers_are_the_nodes("xdp");
}
