//! Answers of the endpoint's node itself, which reach the client although the packet that they are
//! about has come within another one: on one machine the kernel still marks it as encapsulated.

use std::net::{IpAddr, SocketAddr};

use traffic_policy_testing::capture::{Capture, Frame};
use traffic_policy_testing::cluster::{Cluster, Protocol};
use traffic_policy_testing::flood;
use traffic_policy_testing::lab::{Family, Lab, plan};
use traffic_policy_testing::object::lease;
use traffic_policy_testing::pace::until;
use traffic_policy_testing::packet::{Packet, flag};
use traffic_policy_testing::traffic::Outcome;

use super::{PATIENCE, VIP_PORT, VIPS, header, service};

const CLIENT_PORT: u16 = 40_000;
const ACKNOWLEDGED: u32 = 5_000;

fn start(attach: &str, forwarding: &str, dispatch: &str) -> Cluster {
    let mut cluster = Cluster::start(Lab::builder().pods(&[0, 1])).unwrap();
    let of = |node| lease::tunnels(node, &Family::BOTH, "ipip,udp");
    let leases: Vec<_> = cluster.lab.nodes().iter().map(of).collect();
    cluster.manifests.write("leases", &leases).unwrap();
    cluster.manifests.apply(&service(), &cluster.backends()).unwrap();
    let flags = ["--algorithm", "maglev", "--forwarding", forwarding, "--dispatch", dispatch];
    cluster.launch(|agent| agent.attach(attach).flags(&flags)).unwrap();
    for vip in VIPS {
        cluster.lab.route_vip(vip, cluster.lab.node(1)).unwrap();
    }
    cluster
}

/// Whether a frame is an RST of the frontend for the segment of no connection.
fn is_reset(frame: &Frame, vip: IpAddr) -> bool {
    let l4 = 14 + if vip.is_ipv4() { 20 } else { 40 };
    !frame.outgoing
        && header(frame).is_some_and(|(protocol, from, _)| protocol == 6 && from == vip)
        && frame.bytes[l4..l4 + 2] == VIP_PORT.to_be_bytes()
        && frame.bytes[l4 + 4..l4 + 8] == ACKNOWLEDGED.to_be_bytes()
        && frame.bytes[l4 + 13] == flag::RST
}

fn segments_of_no_connection_are_reset(attach: &str, forwarding: &str, dispatch: &str) {
    let cluster = start(attach, forwarding, dispatch);
    let (client, home) = (cluster.lab.client(), &cluster.agents[1]);
    let mut sent = 0;
    for (family, vip) in Family::BOTH.into_iter().zip(VIPS) {
        let from = SocketAddr::new(client.address(family), CLIENT_PORT);
        let to = SocketAddr::new(vip, VIP_PORT);
        let ends = [from, to].map(|end| (end.ip(), end.port()));
        // As long as the answer, a little longer, and much.
        for length in [0, 1, 1_000] {
            let segment = Packet::tcp(ends[0], ends[1], flag::ACK)
                .numbers(1_000, ACKNOWLEDGED)
                .payload(&vec![7; length])
                .macs(client.addresses.mac(), plan::client_gateway(0).mac());
            let capture = Capture::start(client.netns(), "eth0").unwrap();
            client.netns().run(|| flood::send_frame("eth0", &segment.bytes())).unwrap();
            sent += 1;
            until("the answer is counted", PATIENCE, || {
                home.packets("tc-ingress", "reset-no-flow").is_ok_and(|count| count == sent)
            });
            // What is sent and answered later comes by the same devices, behind it.
            let later = Protocol::Tcp.probe(to).from(client.netns()).unwrap();
            assert!(matches!(later, Outcome::Answered(_)), "{later:?}");
            let frames = capture.finish_valid().unwrap();
            let resets = frames.iter().filter(|frame| is_reset(frame, vip)).count();
            assert_eq!(resets, 1, "{attach} {forwarding} {dispatch} {family:?}, {length} bytes");
        }
    }
}

#[test]
fn segments_of_no_connection_are_reset_tc() {
    segments_of_no_connection_are_reset("tc", "direct", "ipip");
}

#[test]
fn segments_of_no_connection_are_reset_within_udp() {
    segments_of_no_connection_are_reset("tc", "direct", "udp");
}

#[test]
fn segments_of_no_connection_are_reset_by_tunnel() {
    segments_of_no_connection_are_reset("tc", "tunnel", "ipip");
}

#[test]
fn segments_of_no_connection_are_reset_xdp() {
    segments_of_no_connection_are_reset("xdp", "direct", "ipip");
}
