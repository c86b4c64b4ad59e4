//! The programs for packets with headers of variable length, for fragments, and for SCTP. The fast
//! path and egress jump here if they find no ports, or not those of TCP and UDP, at the fixed
//! offsets. Egress also sends replies here that may have to be redirected. Incoming packets with
//! ports go on in [`slow_path`], which reads their headers again; SCTP continues from here in
//! programs of its own, made from the same code.

use traffic_policy_ebpf::{
    abi::{PROTOCOL_SCTP, hook, jump, kind},
    outcome::Outcome,
};

use crate::datapath::{
    clock, counters,
    ctx::{Packet, Skb},
    egress,
    family::Family,
    forward::{self, fragment, outer::Outer, sctp},
    open,
    parse::{
        fixed,
        variable::{ParseVariable, VariableHeaders},
    },
    prefilter, reject, slow_path,
    verdict::{self, Decision},
};

/// The program for incoming packets.
#[inline(always)]
pub fn run<P: Packet, F: ParseVariable + Outer>(packet: P) -> i32 {
    let decision = match incoming::<P, F>(packet) {
        Ok(decision) => decision,
        Err(outcome) => open::conclude::<P, F>(verdict::forget::<F>(outcome.into())),
    };
    verdict::finish(packet, P::HOOK, decision)
}

/// Returns the decision on a packet, after [`open::conclude`].
///
/// # Errors
/// The outcome of passing, before it.
#[inline(always)]
fn incoming<P: Packet, F: ParseVariable + Outer>(packet: P) -> Result<Decision, Outcome> {
    let headers = read::<P, F, { jump::SCTP }>(packet)?;
    F::check_options(packet, &headers.parsed)?;
    if !fragment::note(&headers) {
        return Err(Outcome::DroppedInternalError);
    }
    let now = clock::jiffies();
    if headers.later != 0 {
        let (later, entry) = fragment::later(headers, now)?;
        if !matches!(get!(entry.kind), kind::FORWARD | kind::REPLY | kind::DELIVER | kind::DIRECT) {
            return Err(Outcome::PassedStaleFlow);
        }
        let decision = match forward::resolve_egress::<P, F>(packet, entry, now) {
            Ok(forwarding) => forward::send(packet, &later, &forwarding, later.last),
            Err(decision) => decision,
        };
        let decision = Decision { service: get!(entry.service), ..verdict::forget::<F>(decision) };
        let decision = open::conclude::<P, F>(decision);
        return Ok(reject::if_refused::<P, F>(packet, &later.parsed, decision));
    }
    let parsed = headers.parsed;
    if !prefilter::may_concern::<F>(&parsed.tuple) && !open::was_opened::<P, F>() {
        return Err(Outcome::Passed);
    }
    if !P::SCTP {
        // A copy of that program here would double the instructions that the verifier walks.
        packet.jump::<F, { jump::SLOW_PATH }>();
        return Err(Outcome::PassedMissedTailCall);
    }
    if !fixed::is_whole(packet, &parsed) {
        return Err(Outcome::PassedMalformed);
    }
    let decision = match slow_path::prepare(packet, &parsed, now) {
        Ok((forwarding, last)) => {
            // Without the first fragment the others are useless.
            let cut = sctp::is_cut::<P, F>(&parsed, forwarding.entry);
            if !cut {
                if last != now {
                    fragment::ignore::<F>();
                }
                fragment::record(&parsed);
            }
            let decision = if cut {
                Outcome::DroppedSctpFragment.into()
            } else if sctp::travels_translated::<P, F>(packet, &parsed, &forwarding) {
                sctp::send_translated(packet, &parsed, &forwarding, last)
            } else {
                forward::send(packet, &parsed, &forwarding, last)
            };
            let decision = verdict::forget::<F>(decision);
            counters::settle::<F>(forwarding.entry);
            Decision { service: get!((forwarding.entry).service), ..decision }
        }
        // No fragment is recorded: only TC knows whether it can be sent.
        Err(decision) => verdict::forget::<F>(decision),
    };
    Ok(reject::if_refused::<P, F>(packet, &parsed, open::conclude::<P, F>(decision)))
}

/// Reads the headers of a packet. SCTP continues in its own program of index `SCTP`.
///
/// # Errors
/// The outcome of passing.
#[inline(always)]
fn read<P: Packet, F: ParseVariable, const SCTP: u32>(packet: P) -> Result<VariableHeaders<F>, Outcome> {
    let headers = F::parse_variable(packet)?;
    let is_sctp = headers.parsed.tuple.protocol == PROTOCOL_SCTP;
    if P::SCTP && !is_sctp {
        return Err(Outcome::PassedUnsupportedProtocol);
    }
    if !P::SCTP && is_sctp {
        packet.jump::<F, SCTP>();
        if P::POD {
            // None stands in for it there: this node serves no SCTP.
            return Err(Outcome::PassedUnsupportedProtocol);
        }
        return Err(without_program::<F, SCTP>(&headers));
    }
    Ok(headers)
}

/// Returns the outcome of a packet of SCTP for which there is no program: those of outgoing packets
/// are loaded when this node serves SCTP. Until then such a packet is no reply.
#[inline(always)]
fn without_program<F: Family, const SCTP: u32>(headers: &VariableHeaders<F>) -> Outcome {
    let tuple = &headers.parsed.tuple;
    if SCTP != jump::SCTP_OUT {
        Outcome::PassedMissedTailCall
    } else if headers.later != 0 {
        Outcome::PassedFragment
    } else if prefilter::is_local_endpoint::<F>(tuple.source, tuple.ports.source()) {
        Outcome::PassedNotService
    } else {
        Outcome::Passed
    }
}

/// The program for outgoing packets.
#[inline(always)]
pub fn run_out<P: Skb, F: ParseVariable + Outer>(packet: P) -> i32 {
    verdict::finish(packet, hook::EGRESS, outgoing::<P, F>(packet))
}

#[inline(always)]
fn outgoing<P: Skb, F: ParseVariable + Outer>(packet: P) -> Decision {
    let headers = match read::<P, F, { jump::SCTP_OUT }>(packet) {
        Ok(headers) => headers,
        Err(outcome) => return outcome.into(),
    };
    if !fragment::note(&headers) {
        return Outcome::DroppedInternalError.into();
    }
    if headers.later != 0 {
        let (later, entry) = match fragment::later(headers, clock::jiffies()) {
            Ok(found) => found,
            Err(outcome) => return outcome.into(),
        };
        return egress::translate::<P, F, _, true>(packet, &later, entry, later.last);
    }
    let parsed = &headers.parsed;
    if parsed.is_tcp() && parsed.l4 + 20 > packet.end() {
        return Outcome::PassedMalformed.into();
    }
    let decision = egress::reply::<P, F, true>(packet, parsed);
    if matches!(
        decision.outcome,
        Outcome::RepliedLocal | Outcome::RepliedRedirected | Outcome::RepliedToFront
    ) {
        fragment::record(parsed);
    }
    if decision.is_answered() {
        // The program that answers is the one of devices with Ethernet.
        if P::L2 == 0 && !packet.push_ethernet(F::ETHERTYPE) {
            return Outcome::DroppedInternalError.into();
        }
        reject::to_reject_leaving::<P, F>(packet, parsed, decision)
    } else {
        decision
    }
}
