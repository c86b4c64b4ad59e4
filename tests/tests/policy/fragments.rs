//! Datagrams that do not fit one packet, echoed: fragments there and fragments back.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::time::Duration;

use traffic_policy_testing::agent::{Agent, AgentBuilder};
use traffic_policy_testing::capture::Capture;
use traffic_policy_testing::cluster::Cluster;
use traffic_policy_testing::lab::{Family, Lab};
use traffic_policy_testing::netns::Namespace;
use traffic_policy_testing::object::{Backend, Policy};
use traffic_policy_testing::pace::scaled;
use traffic_policy_testing::rows;
use traffic_policy_testing::traffic::Answer;

const REMOTE: u16 = 30080;
const LOCAL: u16 = 30081;
const LENGTHS: [usize; 4] = [1472, 1473, 4096, 20_000];

/// Sends a text of `length` bytes, and returns the answer.
pub fn echo(namespace: &Namespace, to: SocketAddr, length: usize) -> Answer {
    let text: String = (0..length).map(|at| char::from(b'a' + (at * 7 % 23) as u8)).collect();
    let answer = namespace.run(|| {
        let any = if to.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
        let socket = UdpSocket::bind(SocketAddr::new(any, 0)).unwrap();
        socket.connect(to).unwrap();
        socket.set_read_timeout(Some(scaled(Duration::from_secs(3)))).unwrap();
        let mut buffer = vec![0; 65_536];
        // A datagram may be lost while neighbours are resolved: of its fragments, only one is
        // queued for each.
        for attempt in 1.. {
            socket.send(text.as_bytes()).unwrap();
            match socket.recv(&mut buffer) {
                Ok(got) => return Answer::parse(&String::from_utf8_lossy(&buffer[..got])).unwrap(),
                Err(error) if attempt == 3 => panic!("{length} bytes to {to}: {error}"),
                Err(_) => {}
            }
        }
        unreachable!()
    });
    assert!(answer.said == text, "{length} bytes to {to}: {} came back", answer.said.len());
    answer
}

fn echoed(attach: &str, wire_offloads: bool) {
    let cluster = Cluster::start(Lab::builder().pods(&[1, 1]).wire_offloads(wire_offloads)).unwrap();
    let lab = &cluster.lab;
    for (name, policy, port, number) in
        [("remote", Policy::Cluster, REMOTE, 2), ("local", Policy::Local, LOCAL, 1)]
    {
        let backend = Backend::of(lab.node(number).pod(1));
        cluster.manifests.apply(&Cluster::node_port(name, policy, port), &[backend]).unwrap();
    }
    let agents = Agent::start_first(1, lab, |agent| agent.attach(attach)).unwrap();
    let capture = Capture::start(lab.client().netns(), "eth0").unwrap();
    for family in Family::BOTH {
        for (port, pod, seen) in [
            (REMOTE, "pod-2-1", lab.node(1).address(family)),
            (LOCAL, "pod-1-1", lab.client().address(family)),
        ] {
            for length in LENGTHS {
                let answer = echo(lab.client().netns(), cluster.at(1, family, port), length);
                assert_eq!(
                    (answer.pod.as_str(), answer.client.ip()),
                    (pod, seen),
                    "{attach} {family:?} {length}"
                );
            }
        }
    }
    capture.finish_valid().unwrap();
    for outcome in ["dropped-internal-error", "dropped-mtu-exceeded", "passed-missed-tail-call"] {
        for hook in ["xdp", "tc-ingress", "tc-egress"] {
            assert_eq!(agents[0].packets(hook, outcome).unwrap(), 0, "{attach} {hook} {outcome}");
        }
    }
}

rows! {
    fn by_tc() = echoed("tc", false);
    fn by_tc_with_offloads() = echoed("tc", true);
    fn by_xdp() = echoed("xdp", false);
    fn by_generic_xdp() = echoed("xdp-generic", false);
}

/// The client's fragments fit its link, but not the tunnel to the endpoint's node: they are
/// fragmented again, as by a router.
fn into_a_tunnel(attach: &str) {
    let cluster = Cluster::start(Lab::builder().pods(&[0, 1]).overlay()).unwrap();
    let lab = &cluster.lab;
    let backend = Backend::of(lab.node(2).pod(1));
    cluster.manifests.apply(&Cluster::node_port("remote", Policy::Cluster, REMOTE), &[backend]).unwrap();
    let devices = |agent: AgentBuilder| agent.attach(attach).devices(&["eth0", "flannel.1"]);
    let agents = Agent::start_first(1, lab, devices).unwrap();
    for length in [1473, 2000, 4096, 20_000] {
        let answer = echo(lab.client().netns(), cluster.at(1, Family::V4, REMOTE), length);
        assert_eq!(answer.pod, "pod-2-1", "{attach} {length}");
    }
    let dropped = agents[0].packets("tc-ingress", "dropped-mtu-exceeded").unwrap();
    assert_eq!(dropped, 0, "{attach}");
}

#[test]
fn into_a_tunnel_by_tc() {
    into_a_tunnel("tc");
}

#[test]
fn into_a_tunnel_by_generic_xdp() {
    into_a_tunnel("xdp-generic");
}
