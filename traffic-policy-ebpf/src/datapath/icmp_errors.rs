//! The programs for ICMP errors about packets of flows. The flow itself stays as it is: anybody can send an error.

use traffic_policy_ebpf::{
    abi::{Flow, hook, kind},
    outcome::Outcome,
};

use crate::datapath::{
    clock,
    ctx::Packet,
    egress,
    flow::{state, table},
    forward::{self, icmp::Requote, nexthop},
    parse::icmp_error::{Quote, Quoting},
    verdict::{self, Exit},
};

/// The program for errors that come in.
#[inline(always)]
pub fn run<P: Packet, F: Requote>(packet: P) -> i32 {
    verdict::leave(packet, P::HOOK, incoming::<P, F>(packet))
}

#[inline(always)]
fn incoming<P: Packet, F: Requote>(packet: P) -> Exit {
    let quoting = match F::quoting(packet) {
        Ok(quoting) => quoting,
        Err(outcome) => return outcome.into(),
    };
    let entry = match find_entry(&quoting) {
        Ok(entry) => entry,
        Err(outcome) => return outcome.into(),
    };
    if !matches!(unsafe { (*entry).kind }, kind::FORWARD | kind::REPLY | kind::DELIVER) {
        return Outcome::PassedStaleFlow.into();
    }
    let now = clock::jiffies();
    match nexthop::way_out::<P, F>(packet, entry, now) {
        Ok(ready) => forward::carry_out(packet, &quoting, &ready, now),
        Err(exit) => exit,
    }
}

/// The program for errors that leave this node: of its own stack, which knows only the translated packet, or of an endpoint.
#[inline(always)]
pub fn run_out<P: Packet, F: Requote>(packet: P) -> i32 {
    verdict::leave(packet, hook::EGRESS, outgoing::<P, F>(packet).into())
}

#[inline(always)]
fn outgoing<P: Packet, F: Requote>(packet: P) -> Outcome {
    let quoting = match F::quoting(packet) {
        Ok(quoting) => quoting,
        Err(outcome) => return outcome,
    };
    let entry = match find_entry(&quoting) {
        Ok(entry) => entry,
        Err(outcome) => return outcome,
    };
    egress::translate(packet, &quoting, entry)
}

/// The entry that translates packets of the error's direction.
#[inline(always)]
fn find_entry<F: Quote>(quoting: &Quoting<F>) -> Result<*mut Flow<F::Address>, Outcome> {
    let (entry, pending) = table::find::<F>(&quoting.tuple);
    if entry.is_null() {
        return Err(Outcome::PassedIcmpNoFlow);
    }
    // In `PENDING` one entry of a flow may be left, which says no more whose it is.
    if pending && !state::whole::<F>(entry, &quoting.tuple, pending) {
        return Err(Outcome::PassedStaleFlow);
    }
    // Only whom the quoted packet came from may be told of it, as in nf_conntrack_inet_error:
    // <https://github.com/torvalds/linux/blob/v6.12/net/netfilter/nf_conntrack_proto_icmp.c>
    if unsafe { F::addresses_at(quoting.ip) }.1 != quoting.tuple.destination {
        return Err(Outcome::PassedIcmpNoFlow);
    }
    Ok(entry)
}
