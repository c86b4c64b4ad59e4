//! `--local-delivery direct` behind a card: established packets go from the card straight into the
//! pod, and its replies straight to the card, with its offloads, without them, with long frames, on
//! a VLAN, and behind XDP in the driver.

use std::thread::sleep;
use std::time::{Duration, Instant};

use traffic_policy_dataplane::Kernel;
use traffic_policy_testing::agent::Agent;
use traffic_policy_testing::cluster::Protocol;
use traffic_policy_testing::lab::Family;
use traffic_policy_testing::traffic::Conversation;
use traffic_policy_testing::traffic::transfer::transfer;

use crate::fixture::{CardTestbed, Link, Place, START};
use crate::flows::nothing_failed;
use crate::wires::Wire;

const BYTES: u64 = 1_000_000;
const QUESTIONS: u64 = 100;

fn works(test: &str, [number, second]: [u8; 2], link: Link, attach: &str, delivery: &str) {
    let Some([first, second]) = Wire::find(test, [number, second]) else { return };
    let fixture = CardTestbed::build_with(first, second, link).unwrap();
    let agent = fixture.agent(attach).unwrap().flags(&["--local-delivery", delivery]).start().unwrap();
    agent.wait_ready(START).unwrap();
    let outcome = |hook: &str, outcome: &str| agent.packets(hook, outcome).unwrap();
    let direct = || ["delivered-direct", "replied-direct"].map(|it| outcome("tc-ingress", it));
    let asked = Family::BOTH.into_iter().flat_map(|family| Protocol::BOTH.map(|it| (family, it)));
    let mut asked: Vec<_> = asked
        .map(|(family, protocol)| {
            let to = fixture.at(Place::ThisNode, family);
            let what = format!("{first:?} {link:?} {attach} {delivery} {family:?} {protocol:?}");
            (what, Conversation::open(&fixture.client, protocol, to).unwrap())
        })
        .collect();
    // A flow of datagrams is a stream once it has lasted for two seconds.
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_millis(2500) {
        for (what, conversation) in &mut asked {
            assert!(conversation.is_answered(), "{what}");
        }
        // Its age is what counts, not the number of datagrams.
        sleep(Duration::from_millis(50));
    }
    for (what, conversation) in &mut asked {
        let before = direct();
        (0..QUESTIONS).for_each(|_| assert!(conversation.is_answered(), "{what}"));
        let now = direct();
        let passed = [now[0] - before[0], now[1] - before[1]];
        println!("{what}: {passed:?} of {QUESTIONS} bypassed the stack");
        if delivery == "direct" {
            assert!(passed.iter().all(|packets| *packets >= QUESTIONS * 9 / 10), "{what}: {passed:?}");
        } else {
            assert_eq!(passed, [0, 0], "{what}");
        }
    }
    for family in Family::BOTH {
        // Aggregates of the card, and what it is to segment.
        transfer(&fixture.client, fixture.at(Place::ThisNode, family), BYTES).unwrap();
    }
    if delivery == "direct" {
        the_intended_hook_works(&agent, first, attach);
    }
    nothing_failed(&agent).unwrap();
}

/// Checks that XDP has left packets to TC if, and only if, it was in front of it.
fn the_intended_hook_works(agent: &Agent, wire: Wire, attach: &str) {
    // The driver of the card takes no XDP for frames longer than a page before Linux 6.3, where
    // `auto` leaves the card to TC.
    let in_front = match attach {
        "xdp" => true,
        "auto" => wire.mtu <= 1500 || Kernel::running().unwrap().at_least(6, 3),
        _ => false,
    };
    let left = agent.packets("xdp", "passed-to-tc").unwrap();
    assert_eq!(left >= QUESTIONS, in_front, "XDP has left {left} packets to TC\n{}", agent.log());
}

macro_rules! rows {
    ($($name:ident: $wires:expr, $link:expr, by $attach:literal, $delivery:literal;)*) => {
        $(#[test]
        fn $name() {
            works(concat!("local_delivery::", stringify!($name)), $wires, $link, $attach, $delivery);
        })*
    };
}

rows! {
    four_queues_tc: [0, 1], Link::Card, by "tc", "direct";
    four_queues_xdp: [0, 1], Link::Card, by "xdp", "direct";
    long_frames_tc: [3, 0], Link::Card, by "tc", "direct";
    long_frames_auto: [3, 0], Link::Card, by "auto", "direct";
    no_offloads_tc: [4, 0], Link::Card, by "tc", "direct";
    no_offloads_xdp: [4, 0], Link::Card, by "xdp", "direct";
    vlan_tc: [0, 1], Link::Vlan, by "tc", "direct";
    by_the_stack: [0, 1], Link::Card, by "tc", "stack";
}
