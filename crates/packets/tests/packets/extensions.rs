//! IPv6 extension headers before the transport header, and IPv4 options, their counterpart, in
//! `untouched`.

use traffic_policy_testing::harness::{Device, Frontend, Input, Setup, Spot};
use traffic_policy_testing::packet::{Extension, Packet, Transport};

use crate::dialogue::everywhere;
use crate::table::{self, CLIENT_PORT, Case, ENDPOINT_PORT, PORT, Step, Terms};

const NODE: (Spot, u16) = (Spot::Node, PORT);
const NEAR: (Spot, u16) = (Spot::Near, ENDPOINT_PORT);
const LOCAL: (Spot, u16) = (Spot::Local, ENDPOINT_PORT);
const HOP_BY_HOP: u8 = 0;
const ROUTING: u8 = 43;
const DESTINATION: u8 = 60;

fn setup(endpoint: (Spot, u16)) -> Setup {
    Setup::of(Frontend::new(NODE.0, NODE.1).endpoints(&[endpoint]))
}

fn with(packet: &Packet, extensions: &[Extension]) -> Packet {
    packet.clone().with(|p| p.extensions = extensions.to_vec())
}

/// Chains of headers that are parsed.
fn chains() -> Vec<Vec<Extension>> {
    let mut chains: Vec<_> =
        [HOP_BY_HOP, ROUTING, DESTINATION].map(|number| vec![Extension::padding(number, 1)]).into();
    chains.push(vec![Extension::padding(HOP_BY_HOP, 3), Extension::padding(DESTINATION, 2)]);
    chains.push(
        [HOP_BY_HOP, DESTINATION, ROUTING, DESTINATION].map(|number| Extension::padding(number, 2)).into(),
    );
    // 256 bytes in all, in one and in eight.
    chains.push(vec![Extension::padding(DESTINATION, 31), Extension::padding(DESTINATION, 1)]);
    chains.push(vec![Extension::padding(DESTINATION, 4); 8]);
    chains
}

fn v6(rows: impl Fn(Terms) -> Vec<Case> + Sync) {
    table::run(|terms| if terms.v4() { Vec::new() } else { rows(terms) });
}

#[test]
fn both_ways() {
    v6(|terms| {
        let mut cases = Vec::new();
        for chain in chains() {
            let forwarded = terms.forwarded(NODE, NEAR, Device::Eth0, Spot::RouterNear);
            let reply = terms.reply(NEAR, Device::Eth0, Spot::RouterNear);
            let remote = [
                Step::new(&with(&terms.request(NODE), &chain), "forwarded", &with(&forwarded, &chain)),
                Step::new(&with(&reply, &chain), "replied", &with(&terms.replied(NODE), &chain)),
            ];
            cases.push(Case::new("endpoint on another node", setup(NEAR), remote));
            let delivered = terms.request(NODE).destination(terms.at(LOCAL));
            let answer = terms.answer(LOCAL, (Spot::Client, CLIENT_PORT));
            let answered = answer.clone().source(terms.at(NODE));
            let local = [
                Step::new(&with(&terms.request(NODE), &chain), "delivered", &with(&delivered, &chain)),
                Step::new(&with(&answer, &chain), "replied-local", &with(&answered, &chain)).leaving(),
            ];
            cases.push(Case::new("endpoint on this node", setup(LOCAL), local.clone()));
            let frontend = Frontend::new(NODE.0, NODE.1).endpoints(&[NEAR, LOCAL]).local();
            cases.push(Case::new("policy Local", Setup::of(frontend), local));
        }
        cases
    });
}

#[test]
fn chains_that_pass() {
    v6(|terms| {
        let (request, answer) = (terms.request(NODE), terms.answer(LOCAL, (Spot::Client, CLIENT_PORT)));
        let stop = Extension { number: ROUTING, rest: vec![0, 4, 1, 0, 0, 0, 0] };
        let mut steps = Vec::new();
        for (chain, outcome) in [
            (vec![Extension::padding(DESTINATION, 1); 9], "passed-unsupported-header"),
            (
                vec![Extension::padding(DESTINATION, 31), Extension::padding(DESTINATION, 2)],
                "passed-unsupported-header",
            ),
            (vec![Extension::padding(DESTINATION, 1), stop], "passed-unsupported-header"),
            (
                vec![Extension::padding(DESTINATION, 1), Extension { number: 51, rest: vec![0; 7] }],
                "passed-unsupported-header",
            ),
            (
                vec![Extension::padding(DESTINATION, 1), Extension { number: 50, rest: vec![0; 7] }],
                "passed-unsupported-protocol",
            ),
            (
                vec![Extension::fragment(0, true, 1), Extension::fragment(0, true, 1)],
                "passed-unsupported-header",
            ),
        ] {
            steps.push(Step::passed(&with(&request, &chain), outcome));
            steps.push(Step::passed(&with(&answer, &chain), outcome).leaving());
        }
        let frontend = Frontend::new(NODE.0, NODE.1).endpoints(&[NEAR, LOCAL]);
        vec![Case::new("not walked", Setup::of(frontend), steps)]
    });
}

/// Extension headers before and after the fragment header.
#[test]
fn with_fragments() {
    v6(|terms| {
        let chain = [Extension::padding(HOP_BY_HOP, 1), Extension::padding(DESTINATION, 2)];
        let long = |packet: &Packet| with(packet, &chain).payload(&[3; 3000]);
        let forwarded = terms.forwarded(NODE, NEAR, Device::Eth0, Spot::RouterNear);
        let (from, to) = (long(&terms.request(NODE)).fragments(1400), long(&forwarded).fragments(1400));
        let steps = from.iter().zip(&to).map(|(from, to)| Step::new(from, "forwarded", to));
        let behind = |packet: &Packet| {
            let chain = [Extension::fragment(0, true, 9), Extension::padding(DESTINATION, 2)];
            with(packet, &chain).payload(&[3; 600])
        };
        let later = |packet: &Packet| {
            with(packet, &[Extension::fragment(600, false, 9)]).with(|p| {
                p.transport = Transport::Other(DESTINATION);
            })
        };
        let pair = [
            Step::new(&behind(&terms.request(NODE)), "forwarded", &behind(&forwarded)),
            Step::new(&later(&terms.request(NODE)), "forwarded", &later(&forwarded)),
        ];
        vec![
            Case::new("before the fragment header", setup(NEAR), steps),
            Case::new("behind the fragment header", setup(NEAR), pair),
        ]
    });
}

/// No prefix of a chain is taken for a whole one.
#[test]
fn truncated_anywhere() {
    everywhere(|harness, terms| {
        if terms.v4() {
            return;
        }
        for chain in chains() {
            harness.set_up(&setup(NEAR));
            let whole = with(&terms.request(NODE), &chain).bytes();
            for length in 54..whole.len() {
                let input = Input::new(terms.hook, whole[..length].to_vec());
                let outcome = harness.input(&input).outcome;
                assert!(matches!(outcome, "passed" | "passed-malformed"), "{length}: {outcome}");
            }
            assert!(harness.flows(terms.family).is_empty());
        }
    });
}
