//! Frames with a priority tag (VLAN 0), as some switches send them: a host treats them as untagged.

use std::net::{SocketAddr, UdpSocket};
use std::time::Duration;

use traffic_policy_testing::agent::Agent;
use traffic_policy_testing::cluster::Cluster;
use traffic_policy_testing::flood;
use traffic_policy_testing::lab::{Family, Lab};
use traffic_policy_testing::object::{Backend, Policy};
use traffic_policy_testing::pace::scaled;
use traffic_policy_testing::packet::Packet;
use traffic_policy_testing::traffic::Answer;

const REMOTE: u16 = 30080;
const LOCAL: u16 = 30081;
const CLIENT_PORT: u16 = 40_000;

fn served(attach: &str) {
    let cluster = Cluster::start(Lab::builder().pods(&[1, 1])).unwrap();
    let lab = &cluster.lab;
    for (name, port, number) in [("remote", REMOTE, 2), ("local", LOCAL, 1)] {
        let backend = Backend::of(lab.node(number).pod(1));
        cluster.manifests.apply(&Cluster::node_port(name, Policy::Cluster, port), &[backend]).unwrap();
    }
    let agents = Agent::start_first(1, lab, |agent| agent.attach(attach)).unwrap();
    let node = lab.node(1);
    let router = lab.router().netlink(async |net| net.mac("br0").await).unwrap();
    for family in Family::BOTH {
        let from = SocketAddr::new(lab.client().address(family), CLIENT_PORT);
        let client = lab.client().netns().run(|| UdpSocket::bind(from)).unwrap();
        client.set_read_timeout(Some(scaled(Duration::from_secs(1)))).unwrap();
        for (port, pod) in [(REMOTE, "pod-2-1"), (LOCAL, "pod-1-1")] {
            let to = cluster.at(1, family, port);
            let packet = Packet::udp((from.ip(), CLIENT_PORT), (to.ip(), to.port()))
                .payload(b"hello")
                .macs(router, node.addresses.mac());
            // The third frame belongs to an existing flow.
            for vlan in [Some(0), None, Some(0)] {
                let frame = packet.clone().with(|packet| packet.vlan = vlan).bytes();
                let mut answer = [0; 1024];
                // The first datagram may be lost while neighbours are resolved.
                let got = (0..3).find_map(|_| {
                    lab.router().run(|| flood::send_frame(&node.name, &frame)).unwrap();
                    client.recv(&mut answer).ok()
                });
                let got = got.unwrap_or_else(|| panic!("{attach} {to}, VLAN {vlan:?}: no answer"));
                let answer = Answer::parse(&String::from_utf8_lossy(&answer[..got])).unwrap();
                assert_eq!(answer.pod, pod, "{attach} {to}, VLAN {vlan:?}");
            }
        }
    }
    // XDP sees the tag in the frame, and leaves it to TC.
    for outcome in ["forwarded", "delivered"] {
        assert!(agents[0].packets("tc-ingress", outcome).unwrap() >= 4, "{attach} {outcome}");
    }
}

#[test]
fn by_tc() {
    served("tc");
}

#[test]
fn by_generic_xdp() {
    served("xdp-generic");
}
