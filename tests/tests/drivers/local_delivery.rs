//! `--local-delivery direct` behind a card: established packets go from the card straight into the
//! pod, and its replies straight to the card, with its offloads, without them, and behind XDP in
//! the driver.

use std::time::{Duration, Instant};

use traffic_policy_testing::cluster::Protocol;
use traffic_policy_testing::lab::Family;
use traffic_policy_testing::traffic::Conversation;
use traffic_policy_testing::traffic::transfer::transfer;

use crate::fixture::{CardTestbed, Place, START};
use crate::flows::nothing_failed;
use crate::wires::Wire;

const BYTES: u64 = 1_000_000;
const QUESTIONS: u64 = 100;

fn works(test: &str, number: u8, attach: &str, delivery: &str) {
    let Some([first, second]) = Wire::find(test, [number, u8::from(number == 0)]) else { return };
    let fixture = CardTestbed::build(first, second).unwrap();
    let agent = fixture.agent(attach).unwrap().flags(&["--local-delivery", delivery]).start().unwrap();
    agent.wait_ready(START).unwrap();
    let direct = || ["delivered-direct", "replied-direct"].map(|it| agent.packets("tc-ingress", it).unwrap());
    for family in Family::BOTH {
        for protocol in Protocol::BOTH {
            let what = format!("{first:?} {attach} {delivery} {family:?} {protocol:?}");
            let to = fixture.at(Place::ThisNode, family);
            let mut conversation = Conversation::open(&fixture.client, protocol, to).unwrap();
            // A flow of datagrams is a stream once it has lasted for two seconds.
            let begun = Instant::now();
            while begun.elapsed() < Duration::from_millis(2500) {
                assert!(conversation.is_answered(), "{what}");
            }
            let before = direct();
            (0..QUESTIONS).for_each(|_| assert!(conversation.is_answered(), "{what}"));
            let now = direct();
            let passed = [now[0] - before[0], now[1] - before[1]];
            println!("{what}: {passed:?} of {QUESTIONS} past the stack");
            if delivery == "direct" {
                assert!(passed.iter().all(|packets| *packets >= QUESTIONS * 9 / 10), "{what}: {passed:?}");
            } else {
                assert_eq!(passed, [0, 0], "{what}");
            }
        }
        // Aggregates of the card, and what it is to segment.
        transfer(&fixture.client, fixture.at(Place::ThisNode, family), BYTES).unwrap();
    }
    nothing_failed(&agent).unwrap();
}

macro_rules! rows {
    ($($name:ident: $wire:literal by $attach:literal, $delivery:literal;)*) => {
        $(#[test]
        fn $name() {
            works(concat!("local_delivery::", stringify!($name)), $wire, $attach, $delivery);
        })*
    };
}

rows! {
    four_queues_tc: 0 by "tc", "direct";
    four_queues_xdp: 0 by "xdp", "direct";
    long_frames_tc: 3 by "tc", "direct";
    no_offloads_tc: 4 by "tc", "direct";
    by_the_stack: 0 by "tc", "stack";
}
