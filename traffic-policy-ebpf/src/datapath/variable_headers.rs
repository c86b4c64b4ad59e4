//! The programs for packets with headers of variable length, and for fragments: they come here from the fast path and from
//! egress, which find no ports where they look for them.

use traffic_policy_ebpf::{
    abi::{hook, kind},
    outcome::Outcome,
};

use crate::datapath::{
    clock,
    ctx::Packet,
    egress,
    forward::{self, Rewrite, fragment, nexthop},
    parse::{self, variable::Irregular},
    prefilter::{self, Ours},
    reject, slow_path,
    verdict::{self, Exit},
};

/// The program for packets that come in.
#[inline(always)]
pub fn run<P: Packet, F: Irregular + Rewrite>(packet: P) -> i32 {
    verdict::leave(packet, P::HOOK, incoming::<P, F>(packet))
}

#[inline(always)]
fn incoming<P: Packet, F: Irregular + Rewrite>(packet: P) -> Exit {
    let laid = match F::laid(packet) {
        Ok(laid) => laid,
        Err(outcome) => return outcome.into(),
    };
    if !fragment::note(&laid) {
        return Outcome::DroppedInternalError.into();
    }
    let now = clock::jiffies();
    if laid.later != 0 {
        let (later, entry) = match fragment::later(laid) {
            Ok(found) => found,
            Err(outcome) => return outcome.into(),
        };
        if !matches!(unsafe { (*entry).kind }, kind::FORWARD | kind::REPLY | kind::DELIVER) {
            return Outcome::PassedStaleFlow.into();
        }
        let exit = match nexthop::way_out::<P, F>(packet, entry, now) {
            Ok(ready) => forward::carry_out(packet, &later, &ready, now),
            Err(exit) => exit,
        };
        return reject::if_refused::<P, F>(
            packet,
            &later.parsed,
            Exit { service: unsafe { (*entry).service }, ..exit },
        );
    }
    let parsed = laid.parsed;
    if matches!(prefilter::ours::<F>(&parsed.tuple), Ours::No) {
        return Outcome::Passed.into();
    }
    if parsed.is_tcp() && parsed.l4 + 20 > packet.end() {
        return Outcome::PassedMalformed.into();
    }
    if let Err(outcome) = parse::finish(packet, &parsed) {
        return outcome.into();
    }
    let prepared = slow_path::prepare(packet, &parsed, now);
    // Also where TC has to send it: the next fragment may be here before it has come there.
    let known = match &prepared {
        Ok(_) => true,
        Err(exit) => exit.outcome as u32 == Outcome::PassedToTc as u32,
    };
    if known {
        fragment::record(&parsed);
    }
    let exit = match prepared {
        Ok(ready) => {
            let exit = forward::carry_out(packet, &parsed, &ready, now);
            Exit { service: unsafe { (*ready.entry).service }, ..exit }
        }
        Err(exit) => exit,
    };
    reject::if_refused::<P, F>(packet, &parsed, exit)
}

/// The program for packets that leave.
#[inline(always)]
pub fn run_out<P: Packet, F: Irregular + Rewrite>(packet: P) -> i32 {
    verdict::leave(packet, hook::EGRESS, outgoing::<P, F>(packet).into())
}

#[inline(always)]
fn outgoing<P: Packet, F: Irregular + Rewrite>(packet: P) -> Outcome {
    let laid = match F::laid(packet) {
        Ok(laid) => laid,
        Err(outcome) => return outcome,
    };
    if !fragment::note(&laid) {
        return Outcome::DroppedInternalError;
    }
    if laid.later != 0 {
        let (later, entry) = match fragment::later(laid) {
            Ok(found) => found,
            Err(outcome) => return outcome,
        };
        return egress::translate(packet, &later, entry);
    }
    let parsed = &laid.parsed;
    if parsed.is_tcp() && parsed.l4 + 20 > packet.end() {
        return Outcome::PassedMalformed;
    }
    let outcome = egress::reply(packet, &laid.parsed);
    if outcome as u32 == Outcome::RepliedLocal as u32 {
        fragment::record(&laid.parsed);
    }
    outcome
}
