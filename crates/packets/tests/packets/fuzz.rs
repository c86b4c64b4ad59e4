//! Random bytes: the programs handle them without a fault, and change nothing that is not addressed
//! to a frontend.

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use traffic_policy_testing::harness::{self, Frontend, Harness, Hook, Input, Setup, Spot};
use traffic_policy_testing::packet::{Extension, Packet, Transport};

use crate::table::{ENDPOINT_PORT, PORT, Terms};

fn set_up(harness: &mut Harness) {
    let endpoints = [(Spot::Near, ENDPOINT_PORT), (Spot::Local, ENDPOINT_PORT), (Spot::Slim, ENDPOINT_PORT)];
    harness.set_up(&Setup::of(Frontend::new(Spot::Node, PORT).endpoints(&endpoints)));
    // Every packet passes the prefilter, whatever its port. SAFETY: the element is mapped, and no
    // program runs meanwhile.
    unsafe { harness.tables.prefilter.pointer().write_bytes(0xff, 1) };
}

fn run(cases: u32, frames: &(impl Strategy<Value = Vec<u8>> + Clone), terms: Terms, harness: &Harness) {
    let config = Config { cases, failure_persistence: None, ..Config::default() };
    let ran = TestRunner::new(config).run(frames, |frame| {
        for hook in [terms.hook, Hook::Egress] {
            let ran = harness.input(&Input::new(hook, frame.clone()));
            prop_assert!(
                ran.outcome.starts_with("passed") || addressed(terms, &frame),
                "{hook:?}: {}",
                ran.outcome
            );
        }
        Ok(())
    });
    ran.unwrap_or_else(|error| panic!("{terms:?}: {error}"));
}

/// Whether the bytes contain the frontend's address as the destination.
fn addressed(terms: Terms, frame: &[u8]) -> bool {
    let destination = match terms.at((Spot::Node, PORT)).0 {
        std::net::IpAddr::V4(address) => (30, address.octets().to_vec()),
        std::net::IpAddr::V6(address) => (38, address.octets().to_vec()),
    };
    frame[destination.0..].starts_with(&destination.1)
}

#[test]
fn random_bytes_after_the_ethernet_header() {
    harness::with(|harness| {
        set_up(harness);
        for terms in Terms::all().filter(|terms| terms.tcp) {
            let header = terms.request((Spot::Node, PORT)).bytes()[..14].to_vec();
            let version = if terms.v4() { 4u8 } else { 6 };
            let frames = (proptest::collection::vec(any::<u8>(), 40..200), any::<bool>()).prop_map(
                move |(mut bytes, plausible)| {
                    if plausible {
                        bytes[0] = version << 4 | bytes[0] & 15;
                    }
                    [header.clone(), bytes].concat()
                },
            );
            run(1500, &frames.boxed(), terms, harness);
        }
    });
}

/// Valid packets with a few bytes changed, which come closer to the edge cases than random ones.
#[test]
fn damaged_packets() {
    harness::with(|harness| {
        for terms in Terms::all() {
            set_up(harness);
            let frame = terms.request((Spot::Node, PORT)).payload(&[7; 30]).bytes();
            let damage = proptest::collection::vec((14..frame.len(), any::<u8>()), 1..6);
            let frames = damage.prop_map(move |damage| {
                let mut frame = frame.clone();
                for (at, byte) in damage {
                    frame[at] = byte;
                }
                frame
            });
            run(500, &frames.boxed(), terms, harness);
        }
    });
}

/// Errors, fragments and chains of extension headers with a few bytes changed, at each hook, while
/// their flows exist: packets that are passed are unchanged, which the harness checks.
#[test]
fn damaged_irregular_packets() {
    harness::with(|harness| {
        for terms in Terms::all() {
            set_up(harness);
            let request = terms.request((Spot::Node, PORT)).payload(&[7; 90]);
            harness.run(terms.hook, &request);
            let (kind, code) = if terms.v4() { (3, 3) } else { (1, 4) };
            let (entry, _) = harness.flow(terms.family);
            let seen = request
                .clone()
                .source((entry.new_from.ip(), entry.new_from.port()))
                .destination((entry.new_to.ip(), entry.new_to.port()));
            let error =
                Packet::new(seen.destination, seen.source, Transport::Icmp { kind, code, rest: [0; 4] })
                    .payload(&seen.bytes()[14..]);
            let mut packets = request.fragments(56);
            packets.push(error);
            if !terms.v4() {
                let chain = [0, 43, 60].map(|number| Extension::padding(number, 2)).to_vec();
                packets.push(request.clone().with(|p| p.extensions = chain));
            }
            for packet in packets {
                let frame = packet.bytes();
                let damage = proptest::collection::vec((14..frame.len(), any::<u8>()), 1..6);
                let config = Config { cases: 150, failure_persistence: None, ..Config::default() };
                let ran = TestRunner::new(config).run(&damage, |damage| {
                    let mut frame = frame.clone();
                    for (at, byte) in damage {
                        frame[at] = byte;
                    }
                    for hook in [terms.hook, Hook::Egress] {
                        harness.input(&Input::new(hook, frame.clone()));
                    }
                    Ok(())
                });
                ran.unwrap_or_else(|error| panic!("{terms:?}: {error}"));
            }
        }
    });
}
