//! Corner cases of the Internet checksum.

use traffic_policy_testing::harness::{Device, Frontend, Setup, Spot};
use traffic_policy_testing::packet::{Packet, Transport};

use crate::table::{self, Case, ENDPOINT_PORT, PORT, Step, Terms};

const NODE: (Spot, u16) = (Spot::Node, PORT);
const NEAR: (Spot, u16) = (Spot::Near, ENDPOINT_PORT);
const LOCAL: (Spot, u16) = (Spot::Local, ENDPOINT_PORT);

/// The checksum field of the transport header.
fn field(terms: Terms, packet: &Packet) -> u16 {
    let at = if terms.v4() { 34 } else { 54 } + if terms.tcp { 16 } else { 6 };
    let bytes = packet.bytes();
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}

/// A payload that gives the packet this checksum.
fn payload(terms: Terms, packet: &Packet, wanted: u16) -> Vec<u8> {
    let found = (0..=u16::MAX).find(|word| {
        let packet = packet.clone().payload(&word.to_be_bytes());
        field(terms, &packet) == wanted
    });
    found.unwrap_or_else(|| panic!("no payload gives the checksum {wanted:04x}")).to_be_bytes().to_vec()
}

/// A computed 0 is sent as all ones in UDP; TCP has no such rule.
#[test]
fn a_sum_of_zero() {
    table::run(|terms| {
        let zero = if terms.tcp { 0 } else { 0xffff };
        let mut cases = Vec::new();
        let forwarded = terms.forwarded(NODE, NEAR, Device::Eth0, Spot::RouterNear);
        let delivered = terms.request(NODE).destination(terms.at(LOCAL));
        for (endpoint, outcome, becomes) in [(NEAR, "forwarded", forwarded), (LOCAL, "delivered", delivered)]
        {
            let setup = || Setup::of(Frontend::new(NODE.0, NODE.1).endpoints(&[endpoint]));
            let request = terms.request(NODE);
            for payload in [payload(terms, &request, zero), payload(terms, &becomes, zero)] {
                let step = Step::new(
                    &request.clone().payload(&payload),
                    outcome,
                    &becomes.clone().payload(&payload),
                );
                cases.push(Case::new("sum of zero before or after", setup(), [step]));
            }
        }
        cases
    });
}

#[test]
fn datagrams_without_a_checksum_keep_none() {
    table::run(|terms| {
        if terms.tcp {
            return Vec::new();
        }
        let without = |packet: Packet| {
            packet.with(|p| {
                if let Transport::Udp { checksum, .. } = &mut p.transport {
                    *checksum = false;
                }
            })
        };
        let setup = |endpoint| Setup::of(Frontend::new(NODE.0, NODE.1).endpoints(&[endpoint]));
        let request = without(terms.request(NODE));
        let forwarded = without(terms.forwarded(NODE, NEAR, Device::Eth0, Spot::RouterNear));
        let delivered = without(terms.request(NODE).destination(terms.at(LOCAL)));
        let answer = without(terms.answer(LOCAL, (Spot::Client, 40000)));
        let answered = answer.clone().source(terms.at(NODE));
        vec![
            Case::new(
                "endpoint on another node",
                setup(NEAR),
                [
                    Step::new(&request, "forwarded", &forwarded),
                    Step::new(
                        &without(terms.reply(NEAR, Device::Eth0, Spot::RouterNear)),
                        "replied",
                        &without(terms.replied(NODE)),
                    ),
                ],
            ),
            Case::new(
                "endpoint on this node",
                setup(LOCAL),
                [
                    Step::new(&request, "delivered", &delivered),
                    Step::new(&answer, "replied-local", &answered).leaving(),
                ],
            ),
        ]
    });
}
