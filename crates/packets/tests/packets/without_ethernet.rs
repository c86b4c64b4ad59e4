//! Devices without Ethernet: their programs treat a packet as those of Ethernet treat it with a
//! header before it. Next hops behind such a device are tested, too.

use traffic_policy_testing::harness::{self, Device, Frontend, Harness, Hook, Input, Ran, Setup, Spot};
use traffic_policy_testing::packet::{Extension, Packet, Transport, flag};

use crate::dialogue::{Dialogue, everywhere};
use crate::table::{CLIENT_PORT, ENDPOINT_PORT, PORT, Terms};

const VIP: (Spot, u16) = (Spot::Vip, PORT);
const NEAR: (Spot, u16) = (Spot::Near, ENDPOINT_PORT);
const LOCAL: (Spot, u16) = (Spot::LocalTyped, ENDPOINT_PORT);
const CLIENT: (Spot, u16) = (Spot::ClientTyped, CLIENT_PORT);
const TUNNEL: (Spot, u16) = (Spot::Tunnel, ENDPOINT_PORT);
const ETHERNET: usize = 14;

fn set_up(harness: &mut Harness, endpoint: (Spot, u16)) {
    let setup = Setup::of(Frontend::new(VIP.0, VIP.1).endpoints(&[endpoint]));
    harness.set_up(&setup.with(|setup| setup.devices.push((Device::Tun0, false))));
}

/// The columns of TC: XDP does not run on such devices.
fn all() -> impl Iterator<Item = Terms> {
    Terms::all().filter(|terms| !terms.xdp())
}

/// A packet, and the hook that sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Direction {
    /// An incoming packet that creates a flow, always with an Ethernet header: BPF_PROG_TEST_RUN
    /// takes the first 14 bytes for one, so a packet without it would be one to another host
    /// (PACKET_OTHERHOST), which creates no flow.
    First,
    In,
    Out,
}

/// Runs packets one after the other on fresh maps, with an Ethernet header and without.
fn both(endpoint: (Spot, u16), packets: &[(Direction, Packet)]) -> [Vec<Ran>; 2] {
    [false, true].map(|bare| {
        harness::with(|harness| {
            set_up(harness, endpoint);
            let run = |(direction, packet): &(Direction, Packet)| {
                let frame = packet.clone().macs([0; 6], [0; 6]).bytes();
                let (hook, frame) = match (bare, direction) {
                    (_, Direction::First) | (false, Direction::In) => (Hook::Ingress, frame),
                    (false, Direction::Out) => (Hook::Egress, frame),
                    (true, Direction::In) => (Hook::IngressL3, frame[ETHERNET..].to_vec()),
                    (true, Direction::Out) => (Hook::EgressL3, frame[ETHERNET..].to_vec()),
                };
                harness.input(&Input { device: Device::Tun0, ..Input::new(hook, frame) })
            };
            packets.iter().map(run).collect()
        })
    })
}

/// Checks that the outcomes have these names in both forms, and that the packets are equal except
/// for the header, which a packet that is passed at once does not get.
#[track_caller]
fn same(endpoint: (Spot, u16), packets: &[(Direction, Packet)], outcomes: &[&str]) {
    assert_eq!(packets.len(), outcomes.len());
    let [with, without] = both(endpoint, packets);
    for (((direction, packet), outcome), (with, without)) in
        packets.iter().zip(outcomes).zip(with.iter().zip(&without))
    {
        with.expect(outcome);
        without.expect(outcome);
        assert_eq!(with.action, without.action, "{packet:?}");
        let bare =
            *direction == Direction::Out || *direction == Direction::In && outcome.starts_with("passed");
        assert_eq!(with.frame[if bare { ETHERNET } else { 0 }..], without.frame[..], "{packet:?}");
    }
}

fn fragments(packet: Packet) -> Vec<Packet> {
    let payload: Vec<u8> = (0..3000u32).map(|at| (at * 7) as u8).collect();
    packet.payload(&payload).with(|packet| packet.label = 9).fragments(1448)
}

fn irregular(packet: Packet) -> Packet {
    packet.with(|packet| {
        if packet.source.is_ipv4() {
            packet.options = vec![1; 8];
        } else {
            packet.extensions = vec![Extension::padding(60, 2)];
        }
    })
}

#[test]
fn requests() {
    for terms in all() {
        let request = terms.packet(CLIENT, VIP);
        for (endpoint, outcome, last) in
            [(NEAR, "forwarded", "rejected-ttl-exceeded"), (LOCAL, "delivered", "delivered")]
        {
            let packets = [
                (Direction::First, request.clone()),
                (Direction::In, request.clone()),
                (Direction::In, request.clone().ttl(1)),
            ];
            same(endpoint, &packets, &[outcome, outcome, last]);
        }
    }
}

#[test]
fn what_is_no_service_packet_stays_as_it_was() {
    for terms in all() {
        let other = terms.packet(CLIENT, (Spot::OtherClient, 9));
        let igmp = Packet::new(CLIENT.0.of(terms.family), VIP.0.of(terms.family), Transport::Other(2))
            .payload(&[0; 64]);
        let outcomes = ["passed", "passed-unsupported-protocol"];
        same(NEAR, &[(Direction::In, other), (Direction::In, igmp)], &outcomes);
    }
}

#[test]
fn fragments_options_and_extension_headers() {
    for terms in all() {
        for (endpoint, outcome) in [(NEAR, "forwarded"), (LOCAL, "delivered")] {
            let request = terms.packet(CLIENT, VIP);
            let mut packets =
                vec![(Direction::First, request.clone()), (Direction::In, irregular(request.clone()))];
            packets.extend(fragments(request).into_iter().map(|piece| (Direction::In, piece)));
            same(endpoint, &packets, &vec![outcome; packets.len()]);
        }
    }
}

#[test]
fn replies_of_local_endpoints() {
    for terms in all() {
        let answer = terms.answer(LOCAL, CLIENT);
        let mut packets = vec![(Direction::First, terms.packet(CLIENT, VIP))];
        packets.extend([(Direction::Out, answer.clone()), (Direction::Out, irregular(answer.clone()))]);
        packets.extend(fragments(answer).into_iter().map(|piece| (Direction::Out, piece)));
        let mut outcomes = vec!["replied-local"; packets.len()];
        outcomes[0] = "delivered";
        same(LOCAL, &packets, &outcomes);
        // No endpoint has sent this packet.
        let other = terms.answer((Spot::LocalTyped, 9), CLIENT);
        same(LOCAL, &[(Direction::Out, other)], &["passed"]);
    }
}

/// A port unreachable error, sent by the destination of the packet.
fn error(about: &Packet) -> Packet {
    let (kind, code) = if about.source.is_ipv4() { (3, 3) } else { (1, 4) };
    let quote = about.bytes()[ETHERNET..].to_vec();
    Packet::new(about.destination, about.source, Transport::Icmp { kind, code, rest: [0; 4] }).payload(&quote)
}

#[test]
fn icmp_errors() {
    for terms in all() {
        let request = (Direction::First, terms.packet(CLIENT, VIP));
        let answer = terms.answer(LOCAL, CLIENT);
        // The client rejects the reply, the endpoint the request.
        let (replied, delivered) = (answer.clone().source(terms.at(VIP)), terms.packet(CLIENT, LOCAL));
        let packets = [
            request,
            (Direction::Out, answer),
            (Direction::In, error(&replied)),
            (Direction::Out, error(&delivered)),
        ];
        let outcomes = ["delivered", "replied-local", "delivered-icmp-error", "replied-local-icmp-error"];
        same(LOCAL, &packets, &outcomes);
    }
}

/// A hop behind tun0 needs no neighbour: it is stored, and established packets need nothing else.
#[test]
fn hops_behind_a_tunnel() {
    everywhere(|harness, terms| {
        set_up(harness, TUNNEL);
        let dialogue = Dialogue::new(terms, VIP);
        let opened = dialogue.open(harness);
        if terms.xdp() {
            // No driver accepts XDP frames for a tunnel.
            opened.expect("passed-to-tc");
            return;
        }
        opened.expect("forwarded");
        assert_eq!(opened.frame[..12], [0; 12], "MAC addresses");
        dialogue.answer(harness, flag::SYN | flag::ACK).expect("replied");
        dialogue.let_stream(harness);
        dialogue.send(harness, flag::ACK).expect("forwarded");
        harness.without_jumps(|harness| dialogue.send(harness, flag::ACK).expect("forwarded").clone());
    });
}

#[test]
fn what_is_too_long_for_a_tunnel() {
    const MTU: usize = 1400;
    everywhere(|harness, terms| {
        if terms.xdp() {
            return;
        }
        set_up(harness, TUNNEL);
        let headers = if terms.v4() { 20 } else { 40 } + if terms.tcp { 20 } else { 8 };
        let long = |bytes: usize| {
            let packet = terms.request(VIP).with(|packet| packet.dont_fragment = true);
            packet.payload(&vec![0; bytes - headers])
        };
        assert_eq!(long(MTU).bytes().len() - ETHERNET, MTU, "{terms:?}");
        harness.run(terms.hook, &long(MTU)).expect("forwarded");
        let told = harness.run(terms.hook, &long(MTU + 1));
        told.expect("rejected-mtu-exceeded");
        let at = ETHERNET + if terms.v4() { 20 } else { 40 } + 6;
        assert_eq!(told.frame[at..at + 2], (MTU as u16).to_be_bytes(), "{terms:?}");
    });
}
