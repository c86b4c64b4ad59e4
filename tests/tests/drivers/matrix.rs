//! Each wire with each attach mode: every flow is served, by the intended hook.

use traffic_policy_testing::agent::Agent;

use crate::fixture::{CardTestbed, START};
use crate::flows::{LEAST, nothing_failed, served};
use crate::wires::Wire;

const BYTES: u64 = 1_000_000;

/// The number of the wire of the other card.
fn second(first: u8) -> u8 {
    u8::from(first == 0)
}

fn works(test: &str, number: u8, attach: &str) {
    let Some([first, second]) = Wire::find(test, [number, second(number)]) else { return };
    let fixture = CardTestbed::build(first, second).unwrap();
    let agent: Agent = fixture.agent(attach).unwrap().start().unwrap();
    agent.wait_ready(START).unwrap();
    fixture.requests().unwrap_or_else(|error| panic!("{first:?} {attach}: {error:#}"));
    fixture.transfers(BYTES).unwrap_or_else(|error| panic!("{first:?} {attach}: {error:#}"));
    nothing_failed(&agent).unwrap_or_else(|error| panic!("{first:?} {attach}: {error:#}"));
    let hook = if attach == "tc" { "tc-ingress" } else { "xdp" };
    let packets = served(&agent, hook).unwrap();
    assert!(packets > LEAST, "{first:?} {attach}: only {packets} packets by {hook}");
}

macro_rules! rows {
    ($($name:ident: $wire:literal by $attach:literal;)*) => {
        $(#[test]
        fn $name() {
            works(concat!("matrix::", stringify!($name)), $wire, $attach);
        })*
    };
}

rows! {
    four_queues_xdp: 0 by "xdp";
    four_queues_xdp_generic: 0 by "xdp-generic";
    four_queues_tc: 0 by "tc";
    one_queue_xdp: 1 by "xdp";
    one_queue_tc: 1 by "tc";
    two_queues_xdp: 2 by "xdp";
    long_frames_xdp_generic: 3 by "xdp-generic";
    long_frames_tc: 3 by "tc";
    no_offloads_xdp: 4 by "xdp";
    no_offloads_xdp_generic: 4 by "xdp-generic";
    no_offloads_tc: 4 by "tc";
    fixed_guest_offloads_tc: 5 by "tc";
}
