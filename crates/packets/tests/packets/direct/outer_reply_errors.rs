//! ICMP errors about outer packets that carry replies to the node in front, of routers between the
//! nodes: the endpoint is told about its own packet.

use traffic_policy_testing::harness::{self, Device, Harness, Hook, Spot};
use traffic_policy_testing::packet::Packet;

use super::outer_errors::told;
use super::tunnel::{OTHER_FRONT, answer, asks, through_front, to_front};
use super::way::Way;
use super::{FRONT, LOCAL, NODE, VIP, arrives, outer, set_up_home, terms};
use crate::errors::{WHOLE, error, kinds};
use crate::table::Terms;

/// A router between the nodes.
const BETWEEN: Spot = Spot::RouterFar;

fn comes(terms: Terms, kind: (u8, u8, [u8; 4]), about: &Packet, quoted: usize) -> Packet {
    error(terms, kind, BETWEEN, about, quoted).macs(Spot::Router.mac(), Device::Eth0.mac())
}

/// The endpoint's answer, with data, so that a quote may end anywhere; and as the client is to get
/// it.
fn long_answer(terms: Terms, from: (Spot, u16)) -> (Packet, Packet) {
    let answer = answer(terms).0.payload(&[0x5a; 100]);
    let answered = answer.clone().source(terms.at(from));
    (answer, answered)
}

/// Begins a flow whose replies go back through the node in front, and lets the endpoint answer.
/// Returns the outer packet of that, and in what it has travelled.
fn set_up(harness: &mut Harness, terms: Terms, to: (Spot, u16), way: Way) -> (Packet, Way) {
    set_up_home(harness, to);
    let request = way.arrives(&terms.request(to), FRONT, LOCAL.0).with(through_front);
    harness.run(terms.hook, &request).expect("delivered");
    let (answer, answered) = long_answer(terms, to);
    let ran = harness.run(Hook::Egress, &answer);
    let way = way.of(&ran, terms);
    ran.expect("replied-to-front");
    (sent(&answered, way), way)
}

/// An answer within an outer packet as it leaves for the node in front.
fn sent(answered: &Packet, way: Way) -> Packet {
    way.within(answered, Spot::Node, FRONT).with(|outer| {
        outer.ttl = 64;
        outer.label = 0;
        outer.dont_fragment = true;
    })
}

#[test]
fn the_endpoint_is_told_about_its_own_packet() {
    harness::with(|harness| {
        for terms in terms(Hook::Ingress) {
            for (to, way) in [NODE, VIP].into_iter().flat_map(|to| Way::ALL.map(|way| (to, way))) {
                let (sent, way) = set_up(harness, terms, to, way);
                let before = harness.flows(terms.family);
                let (answer, _) = long_answer(terms, to);
                let bytes = way.bytes(terms);
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
                        let known = error(terms, told, BETWEEN, &answer, quoted - bytes)
                            .macs(Spot::Router.mac(), Device::Eth0.mac());
                        ran.expect("delivered-icmp-error").expect_frame(&known);
                    }
                }
                assert_eq!(harness.flows(terms.family), before, "{terms:?}, {way:?}");
            }
        }
    });
}

/// Errors about packets that this node has not sent are left to its own stack.
#[test]
fn errors_about_other_packets_pass() {
    harness::with(|harness| {
        for terms in terms(Hook::Ingress) {
            for way in Way::ALL {
                others_pass(harness, terms, way);
            }
        }
    });
}

fn others_pass(harness: &mut Harness, terms: Terms, way: Way) {
    let (good, way) = set_up(harness, terms, VIP, way);
    harness.let_send_directly_as(OTHER_FRONT, 2);
    let kind = kinds(terms)[0];
    let (_, answered) = long_answer(terms, VIP);
    let of = |packet: &Packet| comes(terms, kind, packet, WHOLE);
    let at = |spot: Spot| spot.of(terms.family);
    let other_client = answered.clone().with(|packet| packet.destination = at(Spot::OtherClient));
    let other_frontend = answered.clone().with(|packet| packet.source = at(Spot::OtherVip));
    let mut fragments = answered.clone().payload(&[1; 200]).fragments(96);
    let mtu_unknown = if terms.v4() { (3, 4, [0; 4]) } else { (2, 0, [0, 0, 0, 40]) };
    let cases = [
        ("too short a quote", comes(terms, kind, &good, way.bytes(terms) + outer(terms) + 7)),
        ("of a foreign address", of(&way.within(&answered, Spot::OtherNear, FRONT))),
        ("another address of this node", of(&good).with(|packet| packet.destination = at(Spot::NodeEth1))),
        ("another node in front", of(&way.within(&answered, Spot::Node, OTHER_FRONT))),
        ("no node", of(&way.within(&answered, Spot::Node, Spot::OtherClient))),
        ("another client", of(&sent(&other_client, way))),
        ("another frontend", of(&sent(&other_frontend, way))),
        ("a fragment", of(&sent(&fragments.remove(1), way))),
        ("no MTU", comes(terms, mtu_unknown, &good, WHOLE)),
        ("it does not travel in this", of(&sent(&answered, way.otherwise()))),
    ];
    for (what, packet) in &cases {
        let ran = harness.run(terms.hook, packet);
        let passes = ["passed-icmp-no-flow", "passed-malformed"].contains(&ran.outcome);
        assert!(passes, "{what}, {terms:?}, {way:?}: {}", ran.outcome);
        ran.expect_frame(packet);
    }
    harness.run(terms.hook, &of(&good)).expect("delivered-icmp-error");
}

/// Replies that go to the client are not in outer packets of this node.
#[test]
fn replies_to_the_client_are_in_no_outer_packet() {
    harness::with(|harness| {
        for terms in terms(Hook::Ingress) {
            set_up_home(harness, VIP);
            let request = terms.request(VIP);
            let (answer, answered) = answer(terms);
            let about = error_about(terms, &answered);
            harness.run(terms.hook, &arrives(&request, FRONT, LOCAL.0)).expect("delivered");
            harness.run(Hook::Egress, &answer).expect("replied-local");
            harness.run(terms.hook, &about).expect("passed-icmp-no-flow");
            // Nor a request to an endpoint here.
            let other_way = request.clone().with(|packet| packet.source = Spot::OtherClient.of(terms.family));
            harness.run(terms.hook, &asks(&other_way, FRONT)).expect("delivered");
            let about_request = error_about(terms, &other_way);
            harness.run(terms.hook, &about_request).expect("passed-icmp-no-flow");
            harness.run(terms.hook, &asks(&request, FRONT)).expect("delivered");
            harness.run(terms.hook, &about).expect("delivered-icmp-error");
        }
    });
}

fn error_about(terms: Terms, answered: &Packet) -> Packet {
    comes(terms, kinds(terms)[0], &to_front(answered, FRONT), WHOLE)
}
