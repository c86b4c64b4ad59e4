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
    flow::table::FlowTable,
    forward::{self, icmp::RewriteIcmpError},
    parse::icmp_error::{IcmpError, ParseIcmpError},
    verdict::{self, Decision},
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
    match forward::resolve_egress::<P, F>(packet, entry, now) {
        Ok(forwarding) => forward::forward(packet, &error, &forwarding, now),
        Err(decision) => decision,
    }
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
