//! The programs for ICMP errors about packets of flows. The flow itself stays unchanged: any host
//! can send an error.
//!
//! An error about a reply that the endpoint's node has sent directly to the client comes to the
//! node in front, whose address the reply may have as its source. It travels on as a request does,
//! unchanged within an outer packet, to the endpoint's node, which translates it.

use traffic_policy_ebpf::{
    abi::{Flow, PROTOCOL_SCTP, Slot, hook, kind, outer_port, way},
    outcome::Outcome,
};

use crate::datapath::{
    clock,
    ctx::{Packet, Skb},
    egress,
    family::Family,
    flow::table::FlowTable,
    forward::{
        self,
        icmp::RewriteIcmpError,
        nexthop::{self, Route},
        outer::Outer,
        outer_error::{self, TellSender},
    },
    lb::{owners, select},
    node_silence, open,
    parse::icmp_error::{IcmpError, ParseIcmpError},
    value::borrow,
    verdict::{self, Decision},
    words::load16,
};

/// The program for incoming errors.
#[inline(always)]
pub fn run<P: Packet, F: RewriteIcmpError + TellSender>(packet: P) -> i32 {
    let decision = open::conclude::<P, F>(verdict::forget::<F>(incoming::<P, F>(packet)));
    verdict::finish(packet, P::HOOK, decision)
}

#[inline(always)]
fn incoming<P: Packet, F: RewriteIcmpError + TellSender>(packet: P) -> Decision {
    let parsed = F::parse_icmp_error(packet);
    let port = parsed.as_ref().map_or(0, |error| outer_error::port_of(&error.tuple));
    if (port != 0 || matches!(parsed, Err(Outcome::PassedIcmpNoFlow)))
        && !open::was_opened::<P, F>()
        && let Some(decision) = outer_error::tell::<P, F>(packet, port)
    {
        return decision;
    }
    let error = match parsed {
        Ok(error) => error,
        Err(outcome) => return outcome.into(),
    };
    let mut entry = match find_entry(&error) {
        Ok(entry) => entry,
        Err(outcome) => return outcome.into(),
    };
    let now = clock::jiffies();
    if entry.is_null() {
        entry = match to_owner(packet, &error, now) {
            Ok(entry) => entry,
            Err(outcome) => return outcome.into(),
        };
    } else if open::was_opened::<P, F>() {
        let kind = get!(entry.kind);
        if kind != kind::DELIVER && (kind != kind::DIRECT || !open::may_be_sent_on::<P, F>()) {
            return Outcome::PassedStaleFlow.into();
        }
    }
    if !matches!(get!(entry.kind), kind::FORWARD | kind::REPLY | kind::DELIVER | kind::DIRECT) {
        return Outcome::PassedStaleFlow.into();
    }
    let packets = get!(entry.packets);
    if get!(entry.kind) == kind::REPLY && packets.count() == 0 && is_host_unreachable(&error) {
        node_silence::note_unreachable(packets.node());
    }
    match forward::resolve_egress::<P, F>(packet, entry, now) {
        Ok(forwarding) => forward::send(packet, &error, &forwarding, now),
        Err(decision) => decision,
    }
}

/// Returns an entry, in `Scratch::request`, that leads an error about a flow which this node does
/// not know to the endpoint whose reply it is about: the owner of the flow's slot. No flow is
/// created.
///
/// # Errors
/// The outcome of passing, if the owner does not follow from the quoted addresses and ports, or is
/// no endpoint on another node that opens packets.
#[inline(always)]
fn to_owner<P: Packet, F: RewriteIcmpError>(
    packet: P,
    error: &IcmpError<F>,
    now: u32,
) -> Result<*mut Flow<F::Address>, Outcome> {
    let Some(scratch) = F::scratch() else { return Err(Outcome::DroppedInternalError) };
    if error.tuple.protocol == PROTOCOL_SCTP || !packet.is_for_host() {
        return Err(Outcome::PassedIcmpNoFlow);
    }
    set!(scratch.opening = error.tuple);
    let index = if !open::was_opened::<P, F>() {
        owners::of_quoted::<P, F>(scratch)
    } else if open::may_be_sent_on::<P, F>() {
        owners::elsewhere::<F>(scratch, owners::NONE)
    } else {
        owners::NONE
    };
    let Some(slot) = F::slots().lookup::<u32, Slot<F::Address>>(&index) else {
        return Err(Outcome::PassedIcmpNoFlow);
    };
    if select::is_martian::<P, F>(packet) {
        return Err(Outcome::PassedIcmpNoFlow);
    }
    let slot = borrow(slot);
    let Route::Via(via) = nexthop::to_endpoint::<P, F>(packet, index, slot, now) else {
        return Err(Outcome::PassedIcmpNoFlow);
    };
    let entry = place!(mut scratch.request);
    set!(entry.kind = kind::DIRECT);
    set!(entry.source = via.source);
    set!(entry.destination = slot.address);
    set!(entry.hop = via.hop);
    set!(entry.epoch = via.epoch);
    set!(entry.address_delta = 0);
    // The port of UDP that the packet travels in; 0: it travels in IP.
    let spread = error.tuple.ports.source().to_host() as u64;
    let port = outer_port(spread << 16).wire() as u64;
    set!(entry.port_delta = way::moved(slot.dispatch(), way::UDP, port) as u16);
    Ok(entry)
}

/// Whether a router says that it does not reach the host: it has no route, or no neighbour answers
/// (RFC 792, RFC 4443 section 3.1).
#[inline(always)]
fn is_host_unreachable<F: Family>(error: &IcmpError<F>) -> bool {
    let [kind, code] = load16::<0>(error.icmp).to_ne_bytes();
    if F::V6 { kind == 1 && matches!(code, 0 | 3) } else { kind == 3 && matches!(code, 0 | 1) }
}

/// The program for errors that leave this node: those of its own stack, which knows only the
/// translated packet, or those of an endpoint.
#[inline(always)]
pub fn run_out<P: Skb, F: RewriteIcmpError + Outer>(packet: P) -> i32 {
    verdict::finish(packet, hook::EGRESS, outgoing::<P, F>(packet))
}

#[inline(always)]
fn outgoing<P: Skb, F: RewriteIcmpError + Outer>(packet: P) -> Decision {
    let error = match F::parse_icmp_error(packet) {
        Ok(error) => error,
        Err(outcome) => return outcome.into(),
    };
    let entry = match find_entry(&error) {
        Ok(entry) if !entry.is_null() => entry,
        Ok(_) => return Outcome::PassedIcmpNoFlow.into(),
        Err(outcome) => return outcome.into(),
    };
    egress::translate::<P, F, _, true>(packet, &error, entry, clock::jiffies())
}

/// Returns the entry that translates packets of the error's direction, or null.
#[inline(always)]
fn find_entry<F: ParseIcmpError>(error: &IcmpError<F>) -> Result<*mut Flow<F::Address>, Outcome> {
    // Only the sender of the embedded packet gets the error, as in nf_conntrack_inet_error:
    // <https://github.com/torvalds/linux/blob/v6.12/net/netfilter/nf_conntrack_proto_icmp.c>
    if F::addresses_at(error.ip).1 != error.tuple.destination {
        return Err(Outcome::PassedIcmpNoFlow);
    }
    Ok(FlowTable::<F>::new().find(&error.tuple))
}
