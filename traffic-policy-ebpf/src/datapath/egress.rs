//! The program of TC egress: replies of endpoints on this node get the address that the client
//! addressed as their source.
//!
//! The kernel has routed such a packet by the endpoint's address. Routing rules may send the new
//! source by another device (an endpoint on a card of its own, a node with a default route for each
//! of its addresses): then the packet is redirected to that device. This costs a FIB look-up, so it
//! is done only if the request came by another device, once for each flow and epoch.
//!
//! A packet that was redirected, here or by TC ingress, has all its translations: the program of
//! its outgoing device lets it through.

use core::ptr;

use traffic_policy_ebpf::{
    abi::{DeviceOrPlace, Flow, HOP_NO_ETHERNET, HOP_ROUTED, hook, jump, kind},
    outcome::Outcome,
};

use crate::datapath::{
    clock,
    ctx::{LINEAR, Skb},
    family::{V4, V6},
    flow::{established, pair::Transition, state, table::FlowTable},
    forward::{
        self, Rewrite, Translatable, fragment,
        outer::Outer,
        reply_way::{self, ReplyWay},
        sctp, through_front,
    },
    own,
    parse::{self, ETHERTYPE_IPV4, ETHERTYPE_IPV6, Parsed, fixed},
    prefilter,
    verdict::{self, Decision},
    words::load16,
};

/// The egress program of every attached device, including those that lead to pods.
#[inline(always)]
pub fn run<P: Skb>(packet: P) -> i32 {
    let decision = outgoing(packet);
    if P::POD && matches!(decision.outcome, Outcome::Passed | Outcome::PassedNotIp) {
        // Not counted: most of what pods receive is from no Service.
        return P::PASS;
    }
    verdict::finish(packet, hook::EGRESS, decision)
}

#[inline(always)]
fn outgoing<P: Skb>(packet: P) -> Decision {
    if packet.is_redirected() {
        return Outcome::Passed.into();
    }
    packet.pull(LINEAR);
    let data = packet.data();
    if P::L2 != 0 && data + P::L2 > packet.end() || packet.tagged() {
        return Outcome::PassedNotIp.into();
    }
    let ethertype = if P::L2 == 0 { packet.protocol() } else { load16::<12>(data) };
    match ethertype {
        ETHERTYPE_IPV4 => of_family::<P, V4>(packet),
        ETHERTYPE_IPV6 => of_family::<P, V6>(packet),
        _ => Outcome::PassedNotIp.into(),
    }
}

#[inline(always)]
fn of_family<P: Skb, F: Outer>(packet: P) -> Decision {
    let parsed = match F::parse_fixed(packet) {
        Ok(parsed) => parsed,
        Err(outcome) => return parse::hand_over::<P, F, true>(packet, outcome),
    };
    reply::<P, F, false>(packet, &parsed)
}

/// Returns the outcome of an outgoing packet with ports. Without `FULL`, a packet whose request
/// came by another device continues in the program for headers of variable length, which can
/// redirect it. The entry program has no registers to spare.
#[inline(always)]
pub fn reply<P: Skb, F: Outer, const FULL: bool>(packet: P, parsed: &Parsed<F>) -> Decision {
    let of_endpoint = prefilter::is_local_endpoint::<F>(parsed.tuple.source, parsed.tuple.ports.source());
    let mut entry = ptr::null_mut();
    if of_endpoint {
        if let Err(outcome) = fixed::finish(packet, parsed) {
            return outcome.into();
        }
        entry = FlowTable::<F>::new().find(&parsed.tuple);
    }
    if entry.is_null() {
        // What enters a pod leaves this node by no uplink.
        if !P::POD {
            own::note(packet, parsed);
        }
        return if of_endpoint { Outcome::PassedNotService } else { Outcome::Passed }.into();
    }
    if get!(entry.kind) != kind::REPLY_LOCAL {
        return Outcome::PassedStaleFlow.into();
    }
    if FULL && sctp::is_undivided::<P, F>(packet, entry) {
        return sctp::divide::<P, F>(packet);
    }
    if !FULL && may_leave_elsewhere::<P, F>(packet, entry) {
        packet.jump::<F, { jump::VARIABLE_HEADERS_OUT }>();
        // Linux 6.12 to 6.17 assume that a tail call, even one that fails, invalidates all pointers
        // into the packet.
        return Outcome::PassedMissedTailCall.into();
    }
    let mut last = clock::jiffies();
    let established = !parsed.is_sctp::<P>()
        && established::is_established(get!(entry.state), parsed.tcp_flags())
        && established::advance(entry, parsed, established::numbers_of(parsed), last);
    if !established {
        entry = match state::track_reply(packet, parsed, entry) {
            Transition::Keep(kept) => kept,
            Transition::Ignore(kept) => {
                last = get!(kept.last);
                if FULL {
                    fragment::ignore::<F>();
                }
                kept
            }
            Transition::Leave(outcome) => return outcome.into(),
            Transition::Restart(_) | Transition::Forget => return Outcome::PassedStaleFlow.into(),
        };
    }
    if sctp::is_cut::<P, F>(parsed, entry) {
        return Outcome::DroppedSctpFragment.into();
    }
    translate::<P, F, _, FULL>(packet, parsed, entry, last)
}

/// Whether a reply may have to leave by another device than the one that the kernel has chosen. One
/// that leaves by a device without Ethernet stays there, unless it goes back through the node in
/// front: a device with Ethernet takes no packet without an Ethernet header.
#[inline(always)]
fn may_leave_elsewhere<P: Skb, F: Outer>(packet: P, entry: *const Flow<F::Address>) -> bool {
    let came_by = get!(entry.device_or_place);
    if P::L2 == 0 { came_by == DeviceOrPlace::TUNNELLED } else { came_by.device() != packet.ingress() }
}

/// Translates an outgoing packet by its reply entry, and, if `FULL`, redirects it if its route
/// requires that. `last`: the time to note as that of the flow's last packet.
#[inline(always)]
pub fn translate<P: Skb, F: Outer, C: Translatable<P, F>, const FULL: bool>(
    packet: P,
    translatable: &C,
    entry: *mut Flow<F::Address>,
    last: u32,
) -> Decision {
    if get!(entry.kind) != kind::REPLY_LOCAL {
        return Outcome::PassedStaleFlow.into();
    }
    if FULL && may_leave_elsewhere::<P, F>(packet, entry) {
        if P::L2 == 0 || get!(entry.device_or_place) == DeviceOrPlace::TUNNELLED {
            return through_front::send(packet, translatable, entry, last);
        }
        let way = reply_way::find::<P, F>(packet, entry);
        if way.ifindex != 0 {
            return redirect(packet, translatable, entry, last, &way);
        }
    }
    translatable.account(entry, last);
    if !translatable.translate(packet, entry, false) {
        return Outcome::DroppedInternalError.into();
    }
    C::outcome(kind::REPLY_LOCAL).into()
}

/// Translates a packet, and sends it out of another device than the one that the kernel has chosen.
/// Its TTL was decremented when it was routed.
#[inline(always)]
fn redirect<P: Skb, F: Rewrite, C: Translatable<P, F>>(
    packet: P,
    translatable: &C,
    entry: *mut Flow<F::Address>,
    last: u32,
    way: &ReplyWay,
) -> Decision {
    let Some(scratch) = F::scratch() else { return Outcome::DroppedInternalError.into() };
    let hop = way.hop;
    let (mtu, flags) = if hop.is_null() {
        forward::device::unresolved::<F>(way.ifindex, scratch)
    } else {
        (get!(hop.mtu), get!(hop.flags))
    };
    // The kernel has compared the length with the MTU of another device.
    if translatable.wire_length(packet) > mtu {
        return translatable.mtu_exceeded(mtu);
    }
    translatable.account(entry, last);
    if !hop.is_null() {
        forward::macs(translatable.ip() - parse::ETHERNET, hop);
    }
    if !translatable.translate(packet, entry, false) {
        return Outcome::DroppedInternalError.into();
    }
    let action = if flags & HOP_ROUTED != 0 || hop.is_null() && flags & HOP_NO_ETHERNET != 0 {
        packet.send_routed(way.ifindex)
    } else if hop.is_null() {
        packet.send_to(way.ifindex, place!(mut scratch.neighbour))
    } else {
        packet.send(way.ifindex)
    };
    Decision::sent(Outcome::RepliedRedirected, action)
}
