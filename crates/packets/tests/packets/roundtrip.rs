//! Translation there and back of random packets: addresses and ports are restored, and every
//! checksum is right.

use std::cell::RefCell;
use std::net::{IpAddr, SocketAddr};

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use traffic_policy_testing::checksum::{Checksum, verify};
use traffic_policy_testing::harness::{self, Frontend, Harness, Hook, Input, Setup, Spot};
use traffic_policy_testing::packet::{Packet, flag};

use crate::table::{ENDPOINT_PORT, PORT, Terms};

/// Random inputs.
#[derive(Clone, Debug)]
struct Draw {
    client: [u8; 16],
    port: u16,
    ttl: u8,
    traffic_class: u8,
    label: u16,
    options: usize,
    payload: Vec<u8>,
    numbers: (u32, u32),
    seed: u64,
    vip: bool,
    endpoint: Spot,
}

fn draws() -> impl Strategy<Value = Draw> {
    let endpoint = prop_oneof![Just(Spot::Near), Just(Spot::Far), Just(Spot::Local)];
    let header = (2u8.., any::<u8>(), any::<u16>(), 0usize..=10);
    let payload = proptest::collection::vec(any::<u8>(), 0..200);
    let numbers = any::<(u32, u32)>();
    (any::<[u8; 16]>(), 1u16.., header, payload, numbers, any::<u64>(), any::<bool>(), endpoint).prop_map(
        |(client, port, header, payload, numbers, seed, vip, endpoint)| {
            let (ttl, traffic_class, label, options) = header;
            Draw { client, port, ttl, traffic_class, label, options, payload, numbers, seed, vip, endpoint }
        },
    )
}

#[test]
fn there_and_back() {
    harness::with(|harness| {
        let harness = RefCell::new(harness);
        for terms in Terms::all() {
            let config = Config { cases: 200, failure_persistence: None, ..Config::default() };
            let ran = TestRunner::new(config).run(&draws(), |draw| {
                one(&mut harness.borrow_mut(), terms, &draw);
                Ok(())
            });
            ran.unwrap_or_else(|error| panic!("{terms:?}: {error}"));
        }
    });
}

fn one(harness: &mut Harness, terms: Terms, draw: &Draw) {
    let frontend = if draw.vip { (Spot::Vip, PORT) } else { (Spot::Node, PORT) };
    let endpoint = (draw.endpoint, ENDPOINT_PORT);
    let setup = Setup::of(Frontend::new(frontend.0, frontend.1).endpoints(&[endpoint]));
    harness.set_up(&setup.snat_ports(1024..5120).with(|setup| setup.seed = draw.seed));
    let client = client(terms, draw.client);
    let request = decorate(terms, draw, terms.request(frontend).source((client, draw.port)));

    let there = harness.run(terms.hook, &request);
    assert_eq!(verify(&there.frame, false), Checksum::Valid);
    let (_, reply_entry) = harness.flow(terms.family);
    let (to, from) = (reply_entry.to, reply_entry.from);
    assert_eq!(from, SocketAddr::from(terms.at(endpoint)), "replies come from the endpoint");
    let local = draw.endpoint == Spot::Local;
    assert_eq!(there.outcome, if local { "delivered" } else { "forwarded" });
    let expected = request.clone().source((to.ip(), to.port())).destination(terms.at(endpoint));
    let expected = if local { expected } else { expected.ttl(draw.ttl - 1) };
    expect_from_ip(&expected, &there.frame);

    let answer = decorate(terms, draw, terms.answer(endpoint, frontend)).destination((to.ip(), to.port()));
    let answer = answer.with(|packet| {
        if terms.tcp {
            packet.tcp_mut().acknowledgement = draw.numbers.0.wrapping_add(1);
        }
    });
    let hook = if local { Hook::Egress } else { terms.hook };
    let back = harness.input(&Input::new(hook, answer.bytes()));
    assert_eq!(back.outcome, if local { "replied-local" } else { "replied" });
    let expected = answer.source(terms.at(frontend)).destination((client, draw.port));
    let expected = if local { expected } else { expected.ttl(draw.ttl - 1) };
    expect_from_ip(&expected, &back.frame);
}

/// A unicast address that nothing else here has.
fn client(terms: Terms, bytes: [u8; 16]) -> IpAddr {
    if terms.v4() {
        [bytes[0] % 8 + 40, bytes[1], bytes[2], bytes[3]].into()
    } else {
        let mut bytes = bytes;
        (bytes[0], bytes[1]) = (0x20, 1);
        bytes.into()
    }
}

fn decorate(terms: Terms, draw: &Draw, packet: Packet) -> Packet {
    packet.ttl(draw.ttl).payload(&draw.payload).with(|packet| {
        (packet.traffic_class, packet.label) = (draw.traffic_class, draw.label);
        if terms.v4() {
            packet.options = vec![1; draw.options * 4];
        }
        if terms.tcp {
            let tcp = packet.tcp_mut();
            (tcp.sequence, tcp.acknowledgement) = draw.numbers;
            tcp.options = vec![1; draw.options * 4];
            if tcp.flags == flag::SYN {
                tcp.acknowledgement = 0;
            }
        }
    })
}

/// Compares from the IP header on: MAC addresses are the subject of other tests.
#[track_caller]
fn expect_from_ip(expected: &Packet, found: &[u8]) {
    let mut expected = expected.bytes();
    expected[..12].copy_from_slice(&found[..12]);
    if let Some(difference) = traffic_policy_testing::packet::difference(&expected, found) {
        panic!("{difference}");
    }
}
