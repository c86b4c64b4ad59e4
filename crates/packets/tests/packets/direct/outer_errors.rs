//! ICMP errors about outer packets, of routers between the nodes: the client is told about its own
//! packet.

use traffic_policy_testing::harness::{self, Device, Frontend, Harness, Hook, Setup, Spot};
use traffic_policy_testing::packet::{Packet, Transport};

use super::{NEAR, NODE, VIP, outer, terms, way::Way};
use crate::errors::{WHOLE, error, kinds};
use crate::sctp::{CLIENT_TAG, init, sctp};
use crate::table::Terms;

/// A router between the nodes.
const BETWEEN: Spot = Spot::RouterNear;

fn comes(terms: Terms, kind: (u8, u8, [u8; 4]), about: &Packet, quoted: usize) -> Packet {
    error(terms, kind, BETWEEN, about, quoted).macs(BETWEEN.mac(), Device::Eth0.mac())
}

/// A request with data, so that a quote may end anywhere.
fn request(terms: Terms, to: (Spot, u16)) -> Packet {
    terms.request(to).payload(&[0x5a; 100])
}

/// Type, code and last word of the sender's error for one about a packet with `outer` bytes of
/// outer headers.
pub(super) fn told(
    terms: Terms,
    outer: usize,
    (kind, code, rest): (u8, u8, [u8; 4]),
) -> Option<(u8, u8, [u8; 4])> {
    let less = |mtu: u16| mtu - u16::try_from(outer).unwrap();
    let mtu = less(u16::from_be_bytes([rest[2], rest[3]]).max(100)).to_be_bytes();
    match (terms.v4(), kind, code) {
        // Within UDP this is the answer of an endpoint whose node does not open packets for it yet.
        (true, 3, 3) | (false, 1, 4) => None,
        (true, 3, 4) | (false, 2, _) => Some((kind, code, [0, 0, mtu[0], mtu[1]])),
        (true, 3 | 11, _) => Some((3, 1, [0; 4])),
        (false, 1 | 3, _) => Some((1, 3, [0; 4])),
        _ => None,
    }
}

/// Begins a flow to the frontend.
fn set_up(harness: &mut Harness, terms: Terms, to: (Spot, u16), way: Way) -> Way {
    harness.set_up(&Setup::of(way.frontend(to)));
    let ran = harness.run(terms.hook, &terms.request(to));
    let way = way.of(&ran, terms);
    ran.expect("forwarded-direct");
    way
}

#[test]
fn the_client_is_told_about_its_own_packet() {
    harness::with(|harness| {
        for terms in terms(Hook::Ingress) {
            for (to, way) in [NODE, VIP].into_iter().flat_map(|to| Way::ALL.map(|way| (to, way))) {
                let way = set_up(harness, terms, to, way);
                let before = harness.flows(terms.family);
                let request = request(terms, to);
                let (sent, bytes) = (way.sent(&request), way.bytes(terms));
                let least = bytes + outer(terms) + 8;
                for kind in kinds(terms) {
                    for quoted in [WHOLE, least + 1, least] {
                        let comes = comes(terms, kind, &sent, quoted);
                        harness.run(Hook::Xdp, &comes).expect("passed-icmp-no-flow");
                        let ran = harness.run(terms.hook, &comes);
                        let Some(told) = told(terms, bytes, kind) else {
                            ran.expect("passed-icmp-no-flow");
                            continue;
                        };
                        let known = error(terms, told, to.0, &request, quoted - bytes)
                            .macs(Device::Eth0.mac(), Spot::Router.mac());
                        ran.expect("replied-icmp-error").expect_frame(&known);
                    }
                }
                assert_eq!(harness.flows(terms.family), before, "{terms:?}, {way:?}");
            }
        }
    });
}

/// Errors of other kinds, and those that quote no packet of a direct flow or too little of it, are
/// passed to the node's stack.
#[test]
fn other_errors_about_packets_within_packets_pass() {
    harness::with(|harness| {
        for terms in terms(Hook::Ingress) {
            for way in Way::ALL {
                others_pass(harness, terms, way);
            }
        }
    });
}

fn others_pass(harness: &mut Harness, terms: Terms, way: Way) {
    let way = set_up(harness, terms, VIP, way);
    let kind = kinds(terms)[0];
    let request = request(terms, VIP);
    let sent = way.sent(&request);
    let of = |packet: &Packet| comes(terms, kind, packet, WHOLE);
    let at = |spot: Spot| spot.of(terms.family);
    let other_client = request.clone().with(|packet| packet.source = at(Spot::OtherClient));
    let not_opened = match (terms.v4(), way.is_udp()) {
        (true, false) => (3, 2, [0; 4]),
        (true, true) => (3, 3, [0; 4]),
        (false, false) => (4, 1, [0, 0, 0, 6]),
        (false, true) => (1, 4, [0; 4]),
    };
    let mtu_unknown = if terms.v4() { (3, 4, [0; 4]) } else { (2, 0, [0, 0, 0, 40]) };
    let mut fragment = request.clone().payload(&[1; 200]).fragments(96);
    let cases = [
        ("too short a quote", comes(terms, kind, &sent, way.bytes(terms) + outer(terms) + 7)),
        ("another outer source", of(&way.within(&request, Spot::NodeEth1, NEAR.0))),
        ("another endpoint", of(&way.within(&request, Spot::Node, Spot::OtherNear))),
        ("to another node", of(&sent).with(|packet| packet.destination = at(Spot::NodeEth1))),
        ("another flow", of(&way.sent(&other_client))),
        ("a fragment", of(&way.sent(&fragment.remove(1)))),
        ("an endpoint whose node does not know it yet", comes(terms, not_opened, &sent, WHOLE)),
        ("no MTU", comes(terms, mtu_unknown, &sent, WHOLE)),
        ("the flow does not travel in this", of(&way.otherwise().sent(&request))),
        ("nor in this", of(&if way.is_udp() { Way::Ip } else { Way::Udp(1024) }.sent(&request))),
    ];
    for (what, packet) in &cases {
        let ran = harness.run(terms.hook, packet);
        let passes = ["passed-icmp-no-flow", "passed-malformed"].contains(&ran.outcome);
        assert!(passes, "{what}, {terms:?}, {way:?}: {}", ran.outcome);
    }
    harness.run(terms.hook, &of(&sent)).expect("replied-icmp-error");
    // Nothing was sent directly.
    harness.set_up(&Setup::of(Frontend::new(VIP.0, VIP.1).endpoints(&[NEAR])));
    harness.run(terms.hook, &terms.request(VIP)).expect("forwarded");
    harness.run(terms.hook, &of(&sent)).expect("passed-icmp-no-flow");
    // Nor is an error sent about an error.
    let way = set_up(harness, terms, VIP, way);
    let (number, code, rest) = kind;
    let inner = Packet::new(at(Spot::Client), at(VIP.0), Transport::Icmp { kind: number, code, rest });
    let about_error = of(&way.within(&inner.payload(&[7; 60]), Spot::Node, NEAR.0));
    harness.run(terms.hook, &about_error).expect("passed-icmp-no-flow");
}

/// The CRC of SCTP covers no address, and the quote is too short for it anyway.
#[test]
fn an_associations_client_is_told() {
    harness::with(|harness| {
        for terms in terms(Hook::Ingress).filter(|terms| terms.tcp) {
            for way in Way::ALL {
                harness.set_up(&Setup::of(way.frontend(VIP)));
                let init = sctp(&terms.request(VIP), 0, &init(CLIENT_TAG));
                let way = way.of(&harness.run(terms.hook, &init), terms);
                for kind in kinds(terms) {
                    let Some(told) = told(terms, way.bytes(terms), kind) else { continue };
                    let known = error(terms, told, VIP.0, &init, WHOLE);
                    let ran = harness.run(terms.hook, &comes(terms, kind, &way.sent(&init), WHOLE));
                    let known = known.macs(Device::Eth0.mac(), Spot::Router.mac());
                    ran.expect("replied-icmp-error").expect_frame(&known);
                }
            }
        }
    });
}
