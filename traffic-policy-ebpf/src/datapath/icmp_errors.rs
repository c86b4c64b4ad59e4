//! The programs for ICMP errors about packets of flows. The flow itself stays unchanged: any host
//! can send an error.

use traffic_policy_ebpf::{
    abi::{Flow, hook, kind},
    outcome::Outcome,
};

use crate::datapath::{
    clock,
    ctx::{Packet, Skb},
    egress,
    family::Family,
    flow::table::FlowTable,
    forward::{self, icmp::RewriteIcmpError},
    node_silence,
    parse::icmp_error::{IcmpError, ParseIcmpError},
    verdict::{self, Decision},
    words::load16,
};

/// The program for incoming errors.
#[inline(always)]
pub fn run<P: Packet, F: RewriteIcmpError>(packet: P) -> i32 {
    verdict::finish(packet, P::HOOK, incoming::<P, F>(packet))
}

#[inline(always)]
fn incoming<P: Packet, F: RewriteIcmpError>(packet: P) -> Decision {
    let error = match F::parse_icmp_error(packet) {
        Ok(error) => error,
        Err(outcome) => return outcome.into(),
    };
    let entry = match find_entry(&error) {
        Ok(entry) => entry,
        Err(outcome) => return outcome.into(),
    };
    if !matches!(get!(entry.kind), kind::FORWARD | kind::REPLY | kind::DELIVER) {
        return Outcome::PassedStaleFlow.into();
    }
    let now = clock::jiffies();
    let packets = get!(entry.packets);
    if get!(entry.kind) == kind::REPLY && packets.count() == 0 && is_host_unreachable(&error) {
        node_silence::note_unreachable(packets.node());
    }
    match forward::resolve_egress::<P, F>(packet, entry, now) {
        Ok(forwarding) => forward::forward(packet, &error, &forwarding, now),
        Err(decision) => decision,
    }
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
pub fn run_out<P: Skb, F: RewriteIcmpError>(packet: P) -> i32 {
    verdict::finish(packet, hook::EGRESS, outgoing::<P, F>(packet))
}

#[inline(always)]
fn outgoing<P: Skb, F: RewriteIcmpError>(packet: P) -> Decision {
    let error = match F::parse_icmp_error(packet) {
        Ok(error) => error,
        Err(outcome) => return outcome.into(),
    };
    let entry = match find_entry(&error) {
        Ok(entry) => entry,
        Err(outcome) => return outcome.into(),
    };
    egress::translate::<P, F, _, true>(packet, &error, entry, clock::jiffies())
}

/// Returns the entry that translates packets of the error's direction.
#[inline(always)]
fn find_entry<F: ParseIcmpError>(error: &IcmpError<F>) -> Result<*mut Flow<F::Address>, Outcome> {
    let entry = FlowTable::<F>::new().find(&error.tuple);
    if entry.is_null() {
        return Err(Outcome::PassedIcmpNoFlow);
    }
    // Only the sender of the embedded packet gets the error, as in nf_conntrack_inet_error:
    // <https://github.com/torvalds/linux/blob/v6.12/net/netfilter/nf_conntrack_proto_icmp.c>
    if F::addresses_at(error.ip).1 != error.tuple.destination {
        return Err(Outcome::PassedIcmpNoFlow);
    }
    Ok(entry)
}
