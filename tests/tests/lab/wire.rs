//! Frames on the wire: checksums with and without offload, and the requirements of XDP on a veth at
//! the other end.

use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::time::Duration;

use etherparse::PacketBuilder;
use socket2::{Domain, Protocol, Socket, Type};
use traffic_policy_testing::capture::{Capture, Frame};
use traffic_policy_testing::checksum::Checksum;
use traffic_policy_testing::lab::{Family, Lab};
use traffic_policy_testing::pace::scaled;
use traffic_policy_testing::traffic::server::Identity;
use traffic_policy_testing::traffic::transfer::transfer;
use traffic_policy_testing::traffic::{Faults, Ledger, Server};
use traffic_policy_testing::xdp::Always;

const PORT: u16 = 8080;

/// The frames that arrive at node-1 while a client exchanges a megabyte with it.
fn frames_of_a_transfer(offloads: bool) -> Vec<Frame> {
    let lab = Lab::builder().nodes(1).wire_offloads(offloads).build().unwrap();
    let identity = Identity { pod: "host".to_owned(), node: "node-1".to_owned() };
    let node = lab.node(1);
    let _server =
        Server::start_in(node.netns(), PORT, identity, Faults::default(), &Ledger::default()).unwrap();
    let capture = Capture::start(node.netns(), "eth0").unwrap();
    for family in Family::BOTH {
        transfer(lab.client().netns(), SocketAddr::new(node.address(family), PORT), 1 << 20).unwrap();
    }
    capture.finish_valid().unwrap().into_iter().filter(|frame| !frame.outgoing).collect()
}

#[test]
fn without_offloads_every_checksum_on_the_wire_is_real() {
    let frames = frames_of_a_transfer(false);
    let unfinished = frames.iter().find(|frame| frame.checksum == Checksum::Unfinished);
    assert!(unfinished.is_none(), "{}", unfinished.unwrap());
    assert!(frames.iter().filter(|frame| frame.checksum == Checksum::Valid).count() > 100);
    let largest = frames.iter().map(|frame| frame.bytes.len()).max().unwrap();
    assert!(largest <= 1514, "{largest}");
}

#[test]
fn with_offloads_checksums_are_unfinished_and_segments_large() {
    let frames = frames_of_a_transfer(true);
    assert!(frames.iter().any(|frame| frame.checksum == Checksum::Unfinished));
    assert!(frames.iter().any(|frame| frame.bytes.len() > 1514));
}

#[test]
fn a_wrong_checksum_is_seen_by_capture_and_by_the_receiver() {
    let lab = Lab::builder().nodes(1).build().unwrap();
    let (node, client) = (lab.node(1), lab.client());
    let listener = client.netns().run(|| UdpSocket::bind((client.addresses.v4, PORT))).unwrap();
    listener.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
    let capture = Capture::start(client.netns(), "eth0").unwrap();
    let send = |damage: u8| {
        let mut packet = Vec::new();
        let ip = PacketBuilder::ipv4(node.addresses.v4.octets(), client.addresses.v4.octets(), 64);
        ip.udp(1000, PORT).write(&mut packet, b"hello").unwrap();
        *packet.last_mut().unwrap() ^= damage;
        node.netns().run(|| {
            // IPPROTO_RAW: the packet contains its own IP header.
            let socket = Socket::new(Domain::IPV4, Type::RAW, Some(Protocol::from(255))).unwrap();
            let to = SocketAddr::from((client.addresses.v4, 0));
            socket.send_to(&packet, &to.into()).unwrap();
        });
    };
    send(1);
    let mut buffer = [0; 64];
    let received = listener.recv(&mut buffer);
    assert_eq!(received.unwrap_err().kind(), io::ErrorKind::WouldBlock, "the receiver trusted its device");
    send(0);
    assert_eq!(listener.recv(&mut buffer).unwrap(), 5);
    let wrong = Checksum::Wrong("UDP".to_owned());
    let frames = capture.finish().unwrap();
    assert_eq!(frames.iter().filter(|frame| frame.checksum == wrong).count(), 1);
}

#[test]
fn frames_sent_by_xdp_arrive() {
    let lab = Lab::builder().nodes(1).build().unwrap();
    let (node, port) = (lab.node(1), "node-1");
    node.netns().attach_xdp("eth0", Always::Transmit).unwrap();
    let capture = Capture::start(lab.router(), port).unwrap();
    // Any frame will do; the one that is sent is an ARP request, which comes straight back.
    lab.router().run(|| {
        let socket = UdpSocket::bind("172.18.0.1:0").unwrap();
        socket.send_to(b"x", (node.addresses.v4, PORT)).unwrap();
    });
    // Time for the frame to come back: the absence of a further one cannot be waited for.
    std::thread::sleep(Duration::from_millis(300));
    let frames = capture.finish().unwrap();
    let arp = |frame: &&Frame| frame.bytes[12..14] == [8, 6];
    let (sent, back): (Vec<_>, Vec<_>) = frames.iter().filter(arp).partition(|frame| frame.outgoing);
    assert_eq!((sent.len(), back.len()), (1, 1));
    node.netns().detach_xdp("eth0").unwrap();
    node.netns().ping("172.18.0.1".parse().unwrap(), scaled(Duration::from_secs(3))).unwrap();
}
