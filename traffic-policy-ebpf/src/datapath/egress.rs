//! Replies of endpoints on this node, on their way out: the source becomes what the client addressed.

use traffic_policy_ebpf::{
    abi::{Flow, hook, kind, source_port},
    outcome::Outcome,
};

use crate::datapath::{
    clock,
    ctx::{LINEAR, Packet},
    family::{V4, V6},
    flow::{
        state::{self, Tracked},
        table,
    },
    forward::{Carried, Rewrite},
    parse::{self, ETHERTYPE_IPV4, ETHERTYPE_IPV6, Parsed},
    prefilter,
    verdict::{self, Exit},
    words::load16,
};

/// The program at the end of every attached device, and of those to pods.
#[inline(always)]
pub fn run<P: Packet>(packet: P) -> i32 {
    packet.reach(LINEAR);
    verdict::leave(packet, hook::EGRESS, outgoing(packet))
}

#[inline(always)]
fn outgoing<P: Packet>(packet: P) -> Exit {
    let data = packet.data();
    if data + parse::ETHERNET > packet.end() || packet.tagged() {
        return Outcome::PassedNotIp.into();
    }
    let outcome = match unsafe { load16::<12>(data) } {
        ETHERTYPE_IPV4 => of_family::<P, V4>(packet),
        ETHERTYPE_IPV6 => of_family::<P, V6>(packet),
        _ => Outcome::PassedNotIp,
    };
    outcome.into()
}

#[inline(always)]
fn of_family<P: Packet, F: Rewrite>(packet: P) -> Outcome {
    let parsed = match F::headers(packet) {
        Ok(parsed) => parsed,
        Err(outcome) => return parse::hand_over::<P, F, true>(packet, outcome).outcome,
    };
    reply(packet, &parsed)
}

/// What becomes of a packet with ports that leaves.
#[inline(always)]
pub fn reply<P: Packet, F: Rewrite>(packet: P, parsed: &Parsed<F>) -> Outcome {
    if !prefilter::is_endpoint(source_port(parsed.tuple.ports)) {
        return Outcome::Passed;
    }
    if let Err(outcome) = parse::finish(packet, parsed) {
        return outcome;
    }
    let (mut entry, pending) = table::find::<F>(&parsed.tuple);
    if entry.is_null() {
        return Outcome::PassedNotService;
    }
    if unsafe { (*entry).kind } != kind::REPLY_LOCAL {
        return Outcome::PassedStaleFlow;
    }
    if pending || !state::quiet(unsafe { (*entry).state }, parsed.tcp_flags()) {
        match state::track(parsed, entry, pending) {
            Tracked::Keep(kept) => entry = kept,
            Tracked::Leave(outcome) => return outcome,
            Tracked::Restart(_) | Tracked::Forget => return Outcome::PassedStaleFlow,
        }
    }
    translate(packet, parsed, entry)
}

/// Carries out what an entry says of packets that leave.
#[inline(always)]
pub fn translate<P: Packet, F: Rewrite, C: Carried<P, F>>(
    packet: P,
    carried: &C,
    entry: *mut Flow<F::Address>,
) -> Outcome {
    if unsafe { (*entry).kind } != kind::REPLY_LOCAL {
        return Outcome::PassedStaleFlow;
    }
    carried.account(entry, clock::jiffies());
    if !carried.translate(packet, entry, false) {
        return Outcome::DroppedInternalError;
    }
    C::outcome(kind::REPLY_LOCAL)
}
