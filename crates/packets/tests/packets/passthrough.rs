//! Packets to no Service, and malformed ones: passed unchanged, byte for byte.

use traffic_policy_testing::harness::{self, Device, Frontend, Harness, Input, Setup, Spot};
use traffic_policy_testing::lab::Family;
use traffic_policy_testing::packet::{Extension, Packet, Transport, flag};

use crate::dialogue::{Dialogue, everywhere};
use crate::table::{self, Case, ENDPOINT_PORT, PORT, Step, Terms};

const NODE: (Spot, u16) = (Spot::Node, PORT);
const NEAR: (Spot, u16) = (Spot::Near, ENDPOINT_PORT);

/// A setup with endpoints on both sides, so that a missing route cannot hide a mistake.
fn setup() -> Setup {
    Setup::of(Frontend::new(NODE.0, NODE.1).endpoints(&[NEAR, (Spot::Local, ENDPOINT_PORT)]))
}

/// The prefilter knows this node's addresses by 16 bits of a hash: a Service address may collide
/// with them, and its port may be a SNAT port.
#[test]
fn a_service_address_that_collides_with_the_nodes_is_served() {
    everywhere(|harness, terms| {
        harness
            .set_up(&Setup::of(Frontend::new(Spot::Vip, PORT).endpoints(&[NEAR])).snat_ports([PORT, 5000]));
        harness.share_bit_with_the_node(terms.at((Spot::Vip, PORT)).0);
        let dialogue = Dialogue::new(terms, (Spot::Vip, PORT));
        dialogue.open(harness).expect("forwarded");
        dialogue.establish(harness);
    });
}

/// The prefilter compares the node's primary address itself. Other addresses, and the primary one
/// where the agent does not know it, are matched by bits.
#[test]
fn node_ports_are_served_by_the_primary_address_or_by_its_bit() {
    everywhere(|harness, terms| {
        let setup = || Setup::of(Frontend::new(NODE.0, NODE.1).endpoints(&[NEAR]));
        for forget in [Harness::forget_node_bits, Harness::forget_primary] {
            harness.set_up(&setup());
            forget(harness);
            let dialogue = Dialogue::new(terms, NODE);
            dialogue.open(harness).expect("forwarded");
            dialogue.establish(harness);
        }
        harness.set_up(&setup());
        harness.forget_primary();
        harness.forget_node_bits();
        Dialogue::new(terms, NODE).open(harness).expect("passed");
    });
}

#[test]
fn other_ports_and_addresses() {
    table::run(|terms| {
        let steps = [
            Step::passed(&terms.request((Spot::Node, 22)), "passed"),
            // A pod's packet on the port of a Service: no look-up, in XDP or in TC.
            Step::passed(&terms.request((Spot::Client, PORT)), "passed"),
            Step::passed(&terms.reply(NEAR, Device::Eth0, Spot::RouterNear), "passed-not-service"),
        ];
        let served = Setup::of(Frontend::new(Spot::Vip, PORT).endpoints(&[NEAR]));
        let forwarded = terms.forwarded((Spot::Vip, PORT), NEAR, Device::Eth0, Spot::RouterNear);
        let other = terms.reply((Spot::OtherNear, ENDPOINT_PORT), Device::Eth0, Spot::RouterNear);
        vec![
            Case::new("no frontend", setup(), steps),
            Case::new(
                "a SNAT port without a flow, while there are flows",
                served,
                [
                    Step::new(&terms.request((Spot::Vip, PORT)), "forwarded", &forwarded),
                    Step::passed(&other, "passed-not-service"),
                ],
            ),
        ]
    });
}

/// A switch that does not know an address yet floods frames: a frame for another machine is left to
/// it, even if both have the Service's address.
#[test]
fn frames_for_other_machines() {
    table::run(|terms| {
        let flooded = |to| Step::passed(&terms.request(NODE).with(|p| p.to = to), "passed-other-host");
        let steps = [flooded([2, 9, 9, 9, 9, 9]), flooded([0xff; 6]), flooded([1, 0, 0x5e, 0, 0, 1])];
        vec![Case::new("another MAC address", setup(), steps)]
    });
}

/// The fast path compares no MAC address: a flooded frame of an established flow is one more copy
/// for its endpoint.
#[test]
fn frames_for_other_machines_of_a_flow_that_stands() {
    table::run(|terms| {
        let forwarded = terms.forwarded(NODE, NEAR, Device::Eth0, Spot::RouterNear);
        let flooded = terms.request(NODE).with(|packet| packet.to = [2, 9, 9, 9, 9, 9]);
        let steps = [
            Step::new(&terms.request(NODE), "forwarded", &forwarded),
            Step::new(&flooded, "forwarded", &forwarded),
        ];
        let near = Setup::of(Frontend::new(NODE.0, NODE.1).endpoints(&[NEAR]));
        vec![Case::new("another MAC address", near, steps)]
    });
}

#[test]
fn other_protocols() {
    table::run(|terms| {
        let request = terms.request(NODE);
        let of = |transport| Packet { transport, ..request.clone() }.payload(&[0x75; 40]);
        let ping = of(Transport::Icmp { kind: if terms.v4() { 8 } else { 128 }, code: 0, rest: [1; 4] });
        let mut arp = request.bytes();
        arp[12..14].copy_from_slice(&[8, 6]);
        let mut steps = vec![
            Step::passed(&request.clone().with(|p| p.vlan = Some(7)), "passed-not-ip"),
            Step::frame(arp, "passed-not-ip"),
            Step::passed(&ping, "passed-unsupported-protocol"),
            Step::passed(&of(Transport::Other(33)), "passed-unsupported-protocol"),
            Step::passed(&of(Transport::Other(4)), "passed-unsupported-protocol"),
        ];
        if terms.v4() {
            let later = request.clone().with(|p| p.fragment_offset = 3);
            let last = request.clone().with(|p| p.fragment_offset = 0x1fff);
            steps.extend([later, last].map(|packet| Step::passed(&packet, "passed-fragment")));
        } else {
            let stop = Extension { number: 43, rest: vec![0, 1, 4, 0, 0, 0, 0] };
            let authentication = Extension { number: 51, rest: vec![0; 7] };
            for (extension, outcome) in [
                (stop, "passed-unsupported-header"),
                (authentication, "passed-unsupported-header"),
                (Extension::fragment(256, false, 1), "passed-fragment"),
                (Extension::padding(59, 1), "passed-unsupported-protocol"),
                (Extension::padding(50, 1), "passed-unsupported-protocol"),
            ] {
                let packet = request.clone().with(|p| p.extensions = vec![extension]);
                steps.push(Step::passed(&packet, outcome));
            }
        }
        vec![Case::new("not a whole TCP segment or datagram", setup(), steps)]
    });
}

/// No prefix of a packet is taken for a whole one. A test run needs a complete Ethernet header.
#[test]
fn truncated_anywhere() {
    harness::with(|harness| {
        for terms in Terms::all() {
            harness.set_up(&setup());
            let plain = terms.request(NODE).payload(b"some payload");
            let mut packets = vec![plain.clone(), plain.clone().payload(b"")];
            if terms.v4() {
                packets.push(plain.clone().with(|p| p.options = vec![1; 40]));
            }
            if terms.tcp {
                packets.push(plain.clone().with(|p| p.tcp_mut().options = vec![1; 40]));
            }
            for packet in packets {
                let whole = packet.bytes();
                for length in shortest(terms)..whole.len() {
                    let frame = whole[..length].to_vec();
                    let ran = harness.input(&Input::new(terms.hook, frame));
                    assert!(
                        matches!(ran.outcome, "passed" | "passed-malformed" | "passed-not-ip"),
                        "{length} of {} bytes: {} ({terms:?})",
                        whole.len(),
                        ran.outcome
                    );
                }
                assert!(harness.flows(terms.family).is_empty(), "a truncated packet made a flow");
                let ran = harness.input(&Input::new(terms.hook, whole));
                assert!(matches!(ran.outcome, "forwarded" | "delivered"), "{}", ran.outcome);
                harness.set_up(&setup());
            }
        }
    });
}

/// The kernel makes no socket buffer for a test run of less than an IP header; live ones may be as
/// short.
fn shortest(terms: Terms) -> usize {
    match (terms.xdp(), terms.v4()) {
        (true, _) => 14,
        (false, true) => 14 + 20,
        (false, false) => 14 + 40,
    }
}

#[test]
fn headers_that_lie() {
    table::run(|terms| {
        let packet = terms.request(NODE).payload(b"payload");
        let (bytes, ip, transport) = (packet.bytes(), 14, if terms.v4() { 34 } else { 54 });
        let changed = |at: usize, value: &[u8]| {
            let mut frame = bytes.clone();
            frame[at..at + value.len()].copy_from_slice(value);
            Step::frame(frame, "passed-malformed")
        };
        let mut steps = Vec::new();
        if terms.v4() {
            let length = (bytes.len() - ip) as u16;
            steps.extend((0..16).filter(|v| *v != 4).map(|version| changed(ip, &[version << 4 | 5])));
            steps.extend((0..5).map(|words| changed(ip, &[0x40 | words])));
            // Fragments and ICMP errors are parsed elsewhere.
            let with = |bytes_at: &[(usize, u8)]| {
                let mut frame = bytes.clone();
                bytes_at.iter().for_each(|(at, value)| frame[*at] = *value);
                Step::frame(frame, "passed-malformed")
            };
            steps.extend([0x40, 0x44, 0x35, 0x65].map(|first| with(&[(ip, first), (ip + 6, 0x20)])));
            steps.extend([0x35, 0x65].map(|first| with(&[(ip, first), (ip + 9, 1), (ip + 20, 3)])));
            steps.push(changed(ip + 2, &(length + 1).to_be_bytes()));
            steps.push(changed(ip + 2, &u16::MAX.to_be_bytes()));
            let least = if terms.tcp { 40 } else { 28 };
            steps.extend((0..least).map(|length: u16| changed(ip + 2, &length.to_be_bytes())));
        } else {
            let length = (bytes.len() - ip - 40) as u16;
            steps.extend((0..16).filter(|v| *v != 6).map(|version| changed(ip, &[version << 4])));
            steps.push(changed(ip + 4, &(length + 1).to_be_bytes()));
            steps.push(changed(ip + 4, &u16::MAX.to_be_bytes()));
            let least = if terms.tcp { 20 } else { 8 };
            steps.extend((0..least).map(|length: u16| changed(ip + 4, &length.to_be_bytes())));
        }
        if terms.tcp {
            steps.extend((0..5).map(|words: u8| changed(transport + 12, &[words << 4])));
        }
        vec![Case::new("lying header", setup(), steps)]
    });
}

/// Ethernet frames have at least 60 bytes; what follows the packet is not part of it.
#[test]
fn padding_stays() {
    table::run(|terms| {
        let (request, setup) =
            (terms.request(NODE), Setup::of(Frontend::new(NODE.0, NODE.1).endpoints(&[NEAR])));
        let forwarded = terms.forwarded(NODE, NEAR, Device::Eth0, Spot::RouterNear);
        vec![Case::new(
            "padded frame",
            setup,
            [Step::with_trailer(&request, "forwarded", &forwarded, &[0xee; 9])],
        )]
    });
}

#[test]
fn options_of_all_lengths_are_kept() {
    table::run(|terms| {
        if terms.family == Family::V6 {
            return Vec::new();
        }
        let setup = Setup::of(Frontend::new(NODE.0, NODE.1).endpoints(&[NEAR]));
        let steps = (0..=10).map(|words| {
            let with = |packet: Packet| packet.with(|p| p.options = vec![1; words * 4]);
            let forwarded = terms.forwarded(NODE, NEAR, Device::Eth0, Spot::RouterNear);
            Step::new(&with(terms.request(NODE)), "forwarded", &with(forwarded))
        });
        vec![Case::new("IPv4 options", setup, steps)]
    });
}

/// Source routes (LSRR, SSRR): a setting of the host decides whether the stack accepts them, and
/// its default is to accept none (`accept_source_route`, RFC 7126 sections 4.3 and 4.4).
#[test]
fn source_routes_are_left_to_the_stack() {
    const HOP: [u8; 4] = [192, 0, 2, 77];
    table::run(|terms| {
        if terms.family == Family::V6 {
            return Vec::new();
        }
        let setup = Setup::of(Frontend::new(NODE.0, NODE.1).endpoints(&[NEAR]));
        let with = |packet: Packet, options: &[u8]| packet.with(|p| p.options = options.to_vec());
        let mut steps = Vec::new();
        for kind in [131, 137] {
            let route = [&[kind, 7, 4][..], &HOP].concat();
            for before in [&[][..], &[1], &[1; 32], &[7, 7, 4, 0, 0, 0, 0]] {
                let mut options = [before, &route].concat();
                options.resize(options.len().next_multiple_of(4), 0);
                let packet = with(terms.request(NODE), &options);
                steps.push(Step::passed(&packet, "passed-unsupported-header"));
                let later = packet.clone().with(|p| p.fragment_offset = 3);
                steps.push(Step::passed(&later, "passed-unsupported-header"));
            }
        }
        // An option with an invalid length ends the parsing, in the stack, too.
        for lying in [[7, 0, 131, 7], [7, 1, 131, 7], [131, 7, 4, 0], [1, 1, 1, 131]] {
            steps.push(Step::passed(&with(terms.request(NODE), &lying), "passed-malformed"));
        }
        // Bytes after the end of the list, or within another option, are not a source route.
        for options in [[0, 131, 7, 4], [148, 4, 131, 4]] {
            let forwarded = terms.forwarded(NODE, NEAR, Device::Eth0, Spot::RouterNear);
            steps.push(Step::new(
                &with(terms.request(NODE), &options),
                "forwarded",
                &with(forwarded, &options),
            ));
        }
        vec![Case::new("source route", setup, steps)]
    });
}

/// No sender begins and ends a connection at once; conntrack calls such a segment invalid.
#[test]
fn a_syn_with_a_fin_opens_nothing() {
    table::run(|terms| {
        if !terms.tcp {
            return Vec::new();
        }
        let packet = terms.request(NODE).with(|p| p.tcp_mut().flags = flag::SYN | flag::FIN);
        vec![Case::new("SYN and FIN", setup(), [Step::passed(&packet, "passed-no-flow")])]
    });
}

/// kubespray takes Services and pods from one /16: 10.233.0.0/18 and 10.233.64.0/18. Only packets
/// to the range itself are looked at.
#[test]
fn addresses_beside_the_service_cidr() {
    table::run(|terms| {
        let steps = [
            Step::dropped(&terms.request((Spot::OtherVip, PORT)), "dropped-unallocated-cluster-ip"),
            Step::passed(&terms.request((Spot::Near, PORT)), "passed"),
            Step::passed(&terms.request((Spot::Local, PORT)), "passed"),
        ];
        vec![Case::new("a pod's packet", setup().service_cidr(Spot::Vip), steps)]
    });
}
