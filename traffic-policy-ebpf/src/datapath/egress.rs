//! The program of TC egress: replies of endpoints on this node get the address that the client named as source.

use core::ptr;

use traffic_policy_ebpf::{
    abi::{Flow, hook, kind},
    outcome::Outcome,
};

use crate::datapath::{
    clock,
    ctx::{LINEAR, Packet},
    family::{V4, V6},
    flow::{
        state::{self, Transition},
        table,
    },
    forward::{Rewrite, Translatable},
    own_datagrams, own_ports,
    parse::{self, ETHERTYPE_IPV4, ETHERTYPE_IPV6, Parsed},
    prefilter,
    verdict::{self, Decision},
    words::load16,
};

/// The program at the end of every attached device, and of those to pods.
#[inline(always)]
pub fn run<P: Packet>(packet: P) -> i32 {
    packet.pull(LINEAR);
    verdict::finish(packet, hook::EGRESS, outgoing(packet))
}

#[inline(always)]
fn outgoing<P: Packet>(packet: P) -> Decision {
    let data = packet.data();
    if data + parse::ETHERNET > packet.end() || packet.tagged() {
        return Outcome::PassedNotIp.into();
    }
    let outcome = match load16::<12>(data) {
        ETHERTYPE_IPV4 => of_family::<P, V4>(packet),
        ETHERTYPE_IPV6 => of_family::<P, V6>(packet),
        _ => Outcome::PassedNotIp,
    };
    outcome.into()
}

#[inline(always)]
fn of_family<P: Packet, F: Rewrite>(packet: P) -> Outcome {
    let parsed = match F::parse_fixed(packet) {
        Ok(parsed) => parsed,
        Err(outcome) => return parse::hand_over::<P, F, true>(packet, outcome).outcome,
    };
    reply(packet, &parsed)
}

/// What becomes of a packet with ports that leaves.
#[inline(always)]
pub fn reply<P: Packet, F: Rewrite>(packet: P, parsed: &Parsed<F>) -> Outcome {
    let Some(endpoints) = prefilter::endpoint_ports() else { return Outcome::Passed };
    let of_endpoint = endpoints.has(parsed.tuple.ports.source());
    let (mut entry, mut pending) = (ptr::null_mut(), false);
    if of_endpoint {
        if let Err(outcome) = parse::finish(packet, parsed) {
            return outcome;
        }
        (entry, pending) = table::find::<F>(&parsed.tuple);
    }
    if entry.is_null() {
        own_datagrams::note(packet, parsed);
        own_ports::note(packet, parsed);
        return if of_endpoint { Outcome::PassedNotService } else { Outcome::Passed };
    }
    if get!(entry.kind) != kind::REPLY_LOCAL {
        return Outcome::PassedStaleFlow;
    }
    let established = !pending
        && state::is_established(get!(entry.state), parsed.tcp_flags())
        && state::advance(entry, state::numbers_of(parsed));
    let mut last = clock::jiffies();
    if !established {
        entry = match state::track_reply(parsed, entry, pending) {
            Transition::Keep(kept) => kept,
            Transition::Ignore(kept) => {
                last = get!(kept.last);
                kept
            }
            Transition::Leave(outcome) => return outcome,
            Transition::Restart(_) | Transition::Forget => return Outcome::PassedStaleFlow,
        };
    }
    translate(packet, parsed, entry, last)
}

/// Translates a packet that leaves by its reply entry. `last`: the time of the flow's last packet then.
#[inline(always)]
pub fn translate<P: Packet, F: Rewrite, C: Translatable<P, F>>(
    packet: P,
    translatable: &C,
    entry: *mut Flow<F::Address>,
    last: u32,
) -> Outcome {
    if get!(entry.kind) != kind::REPLY_LOCAL {
        return Outcome::PassedStaleFlow;
    }
    translatable.account(entry, last);
    if !translatable.translate(packet, entry, false) {
        return Outcome::DroppedInternalError;
    }
    C::outcome(kind::REPLY_LOCAL)
}
