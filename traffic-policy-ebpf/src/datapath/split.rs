//! The program for IPv4 packets that are too long for the outgoing device and may be fragmented
//! (RFC 791 section 3.2): they are translated, and sent in two pieces, as a router does; or each
//! piece travels in an outer packet of its own. `reject` leads here.
//!
//! There are only two pieces, so the packet may be at most about twice as long as what fits; and it
//! must have no options, of which a router copies only some. Other packets that are too long are
//! dropped, aggregates (GRO) as a whole. If the neighbour is not resolved, the first piece is lost:
//! the second makes the kernel resolve it.
//!
//! A checksum that a virtual device left unfinished cannot be finished here, and the datagram is
//! lost at its receiver. Datagrams that their sender has fragmented have complete checksums.

use traffic_policy_ebpf::{
    abi::{
        Address4, BY_MAC, Flow, HOP_NO_ETHERNET, HOP_ROUTED, Piece, REPLY_THROUGH_FRONT, Scratch, hook, jump,
        kind,
    },
    checksum,
    outcome::Outcome,
};

use crate::datapath::{
    barrier::opaque,
    clock,
    ctx::{Packet, Skb as _, tc::Tc},
    family::{Family as _, V4},
    flow::table::FlowTable,
    forward::{
        self, Forwarding, Translatable, direct,
        fragment::Later,
        outer::{self, Outer as _},
    },
    maps::PIECE,
    parse::{ETHERNET, variable::ParseVariable as _},
    trace,
    value::borrow,
    verdict::{self, Decision},
    words::{load16, store16},
};

const HEADER: u32 = 20;
/// The largest length in bytes of a second piece.
const MOST: u32 = size_of::<Piece>() as u32 - 1;
/// The flag for more fragments, in the word of flags and offset, host order.
const MORE_FRAGMENTS: u32 = 0x2000;
/// The other bits of that word.
const DONT_FRAGMENT: u32 = 0x4000;
const OFFSET: u32 = 0x1fff;

#[inline(always)]
pub fn run<const SCTP: bool>(packet: Tc<SCTP>) -> i32 {
    let decision = match split(packet) {
        Ok(decision) => decision,
        Err(()) => {
            // The packet is rejected with its original outcome; nothing was written.
            packet.jump::<V4, { jump::REJECT }>();
            Outcome::PassedMissedTailCall.into()
        }
    };
    verdict::finish(packet, hook::INGRESS, decision)
}

/// Translates a packet and sends it in two pieces.
///
/// # Errors
/// The packet is unchanged, and must be dropped.
#[inline(always)]
fn split<const SCTP: bool>(packet: Tc<SCTP>) -> Result<Decision, ()> {
    let (Some(scratch), Some(piece)) = (V4::scratch(), PIECE.get_ptr_mut(0)) else { return Err(()) };
    let Ok(headers) = V4::parse_variable(packet) else { return Err(()) };
    // The tuple in scratch memory has the ports, which a later fragment lacks.
    let entry = FlowTable::<V4>::new().find(borrow(place!(const scratch.key)));
    if entry.is_null() {
        return Err(());
    }
    let kind = get!(entry.kind);
    if !matches!(kind, kind::FORWARD | kind::REPLY | kind::DIRECT) {
        return Err(());
    }
    let now = clock::jiffies();
    let Ok(forwarding) = forward::resolve_egress::<_, V4>(packet, entry, now) else { return Err(()) };
    let Some(mut route) = Route::of(&forwarding, get!(scratch.mtu)) else { return Err(()) };
    let outer = if kind == kind::DIRECT { enclose(scratch, entry, &mut route) } else { 0 };
    let parsed = headers.parsed;
    if parsed.l4_offset != HEADER || packet.segment() != 0 || parsed.ttl <= 1 || route.mtu < 68 {
        return Err(());
    }
    // The length of each piece of a datagram except the last is a multiple of eight bytes.
    let first = (route.mtu - HEADER) & !7;
    let rest = parsed.length.wrapping_sub(HEADER + first);
    if rest == 0 || rest > MOST || rest > route.mtu - HEADER {
        return Err(());
    }
    // The verifier must know both bounds of this number: before Linux 6.2 it does not conclude a
    // lower bound from a comparison with 0.
    let rest = (opaque((rest - 1) as u64) & MOST as u64) as u32 + 1;
    if !packet.copy_out(ETHERNET as u32 + HEADER + first, piece, rest) {
        return Err(());
    }
    // The helper may have moved the packet, so it is parsed again.
    let Ok(headers) = V4::parse_variable(packet) else { return Err(()) };
    let (parsed, later) = (headers.parsed, headers.later);
    if parsed.l4_offset != HEADER || (later == 0 && parsed.is_tcp() && parsed.l4 + 20 > packet.end()) {
        return Err(());
    }
    let fragment = u16::from_be(load16::<6>(parsed.ip)) as u32;
    if fragment & DONT_FRAGMENT != 0 || (fragment & OFFSET) + (first >> 3) > OFFSET {
        return Err(());
    }
    if !forwarding.hop.is_null() {
        forward::macs(parsed.ip - ETHERNET, forwarding.hop);
    }
    // A segment that the flow ignores must not renew it, and this program cannot tell which
    // segments do. Segments that continue the flow are mostly short, or belong to its other
    // direction.
    let last = if parsed.is_udp::<Tc<SCTP>>() { now } else { get!(entry.last) };
    let translated = if later != 0 {
        translate(packet, &Later { parsed, last }, entry, last)
    } else {
        translate(packet, &parsed, entry, last)
    };
    // Not looked up in a table, because the verifier knows nothing about numbers from a table.
    let outcome = match kind {
        kind::FORWARD => Outcome::Forwarded,
        kind::REPLY => Outcome::Replied,
        _ => Outcome::ForwardedDirect,
    };
    let at = ETHERNET as u32 + outer;
    let sent = translated
        && packet.resize(ETHERNET as u32 + HEADER + first)
        && head(packet, 0, HEADER + first, fragment | MORE_FRAGMENTS)
        && (outer == 0 || wrap(packet, scratch, outer))
        && (!route.resolved || trace::is_on() || packet.send_copy(route.ifindex))
        && packet.resize(at + HEADER + rest)
        && packet.copy_in(at + HEADER, piece, rest)
        && head(packet, outer as usize, HEADER + rest, fragment + (first >> 3))
        && (outer == 0 || direct::write_headers::<_, V4>(packet, scratch));
    if !sent {
        return Ok(Outcome::DroppedInternalError.into());
    }
    let action = if route.resolved {
        packet.send(route.ifindex)
    } else {
        packet.send_to(route.ifindex, place!(mut scratch.neighbour))
    };
    Ok(Decision::sent(outcome, action))
}

/// Counts a packet, and translates it unless it travels as it is.
#[inline(always)]
fn translate<const SCTP: bool, C: Translatable<Tc<SCTP>, V4>>(
    packet: Tc<SCTP>,
    translatable: &C,
    entry: *mut Flow<Address4>,
    now: u32,
) -> bool {
    translatable.account(entry, now);
    get!(entry.kind) == kind::DIRECT || translatable.translate(packet, entry, true)
}

/// Puts the outer headers of `Scratch::outer`, of `outer` bytes, in front of the first piece. The
/// packet is not marked as encapsulated: the kernel refuses to change the length of those that are.
/// <https://github.com/torvalds/linux/blob/v6.12/net/core/filter.c> (`__bpf_skb_change_tail`)
#[inline(always)]
fn wrap<const SCTP: bool>(packet: Tc<SCTP>, scratch: *const Scratch<Address4>, outer: u32) -> bool {
    packet.make_unmarked_room(outer) && direct::write_headers::<_, V4>(packet, scratch)
}

/// Describes the outer packets of a flow that is forwarded directly, in `Scratch::outer`, and takes
/// the room of their headers from the MTU. Returns the bytes of these headers. Aggregates, which
/// have another way than their flow, are not split.
#[inline(always)]
fn enclose(scratch: *mut Scratch<Address4>, entry: *const Flow<Address4>, route: &mut Route) -> u32 {
    let outer = place!(mut scratch.outer);
    let port = get!(entry.port_delta) & !BY_MAC;
    let room = V4::OUTER + outer::udp(port);
    // That of a route whose neighbour is not resolved had the headers taken off.
    if route.resolved {
        route.mtu = route.mtu.wrapping_sub(room);
    }
    set!(outer.number = get!(entry.address_delta) as u32 & REPLY_THROUGH_FRONT);
    set!(outer.port = port);
    set!(outer.ifindex = route.ifindex);
    set!(outer.flags = 0);
    set!(outer.macs = route.macs);
    set!(outer.source_mac_tail = route.source_mac_tail);
    set!(outer.source = get!(entry.source));
    set!(outer.destination = get!(entry.destination));
    room
}

/// Writes the length, and the flags and offset (both host order), of the IP header behind `outer`
/// bytes of outer headers.
#[inline(always)]
fn head<const SCTP: bool>(packet: Tc<SCTP>, outer: usize, length: u32, fragment: u32) -> bool {
    let ip = packet.data() + ETHERNET + outer;
    if ip + HEADER as usize > packet.end() {
        return false;
    }
    let (length, fragment) = ((length as u16).to_be(), (fragment as u16).to_be());
    let former = [load16::<2>(ip), load16::<6>(ip)];
    let delta = checksum::delta(former[0] as u64 + former[1] as u64, length as u64 + fragment as u64);
    store16::<2>(ip, length);
    store16::<6>(ip, fragment);
    store16::<10>(ip, checksum::update(load16::<10>(ip), delta));
    true
}

/// The outgoing route.
struct Route {
    ifindex: u32,
    mtu: u32,
    resolved: bool,
    /// The first bytes of the Ethernet header; 0: written by the kernel.
    macs: u64,
    source_mac_tail: u32,
}

impl Route {
    /// Returns the route; `None` where each piece would need the kernel's own route. `mtu`: the MTU
    /// that was exceeded, for an unresolved neighbour.
    #[inline(always)]
    fn of(forwarding: &Forwarding<Address4>, mtu: u32) -> Option<Self> {
        let hop = forwarding.hop;
        if hop.is_null() {
            let ifindex = forwarding.unresolved;
            let (_, flags) = forward::device::find(ifindex);
            return if ifindex == 0 || flags & HOP_NO_ETHERNET != 0 {
                None
            } else {
                Some(Self { ifindex, mtu, resolved: false, macs: 0, source_mac_tail: 0 })
            };
        }
        let (ifindex, mtu, flags) = (get!(hop.ifindex), get!(hop.mtu), get!(hop.flags));
        if flags & HOP_ROUTED != 0 {
            return None;
        }
        let (macs, source_mac_tail) = (get!(hop.macs), get!(hop.source_mac_tail));
        Some(Self { ifindex, mtu, resolved: true, macs, source_mac_tail })
    }
}
