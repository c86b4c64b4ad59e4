//! Direct forwarding: a packet travels unchanged, within an outer packet that is addressed to the
//! endpoint, to the endpoint's node, which opens it ([`crate::datapath::open`]). IPv4 within IPv4:
//! RFC 2003.

use aya_ebpf::bindings::{__sk_buff, xdp_md};
use traffic_policy_ebpf::{
    abi::{Address, Address4, Flow, HOP_NO_ETHERNET, HOP_XDP, Outer, Scratch, frontend, kind},
    checksum::fold,
    outcome::Outcome,
};

use crate::datapath::{
    ctx::{Packet, Skb as _, tc::Tc, xdp::Xdp},
    family::{Family, V4},
    forward::{self, Forwarding, Rewrite, Translatable},
    lb::List,
    parse::{self, ETHERTYPE_IPV4, fixed::PROTOCOL_IPIP},
    value::store,
    verdict::Decision,
    words::{load8, load16, store16, store32, store64},
};

/// The bytes of the outer header.
pub const OUTER: u32 = 20;
/// Version and header length of the outer header.
const VERSION_AND_LENGTH: u8 = 0x45;
const TTL: u8 = 64;
/// The outer packet is never fragmented: packets that are too long are refused.
const DONT_FRAGMENT: u16 = 0x4000u16.to_be();

/// 1 if a Service's packets are to be forwarded directly, and programs of this kind can do that. A
/// number that is computed without a branch: the verifier would walk both ways to the end.
#[inline(always)]
pub fn wanted<P: Packet, F: Family>(list: &List) -> u8 {
    if F::V6 || P::SCTP {
        return 0;
    }
    (get!((list.frontend).flags) >> frontend::DIRECT.trailing_zeros()) as u8 & 1
}

/// Whether a flow is forwarded directly.
#[inline(always)]
pub fn is_direct<F: Family>(entry: *const Flow<F::Address>) -> bool {
    !F::V6 && get!(entry.kind) == kind::DIRECT
}

/// Sends a packet within an outer packet. All checks precede the first write.
#[inline(always)]
pub fn forward<P: Packet, F: Rewrite, C: Translatable<P, F>>(
    packet: P,
    inner: &C,
    forwarding: &Forwarding<F::Address>,
    now: u32,
) -> Decision {
    let entry = forwarding.entry;
    if inner.ttl() <= 1 {
        return inner.ttl_exceeded().into();
    }
    let Some(scratch) = F::scratch() else { return Outcome::DroppedInternalError.into() };
    let number = take_number(scratch);
    let (hop, unresolved) = (forwarding.hop, forwarding.unresolved);
    let (mtu, flags, ifindex) = if !hop.is_null() {
        (get!(hop.mtu), get!(hop.flags), get!(hop.ifindex))
    } else if P::TC && unresolved != 0 {
        let (mtu, flags) = forward::unresolved::<F>(unresolved, scratch);
        (mtu, flags, unresolved)
    } else {
        return Outcome::DroppedNoRoute.into();
    };
    if inner.wire_length(packet) + OUTER > mtu {
        return if P::TC { inner.mtu_exceeded(mtu - OUTER) } else { Outcome::PassedToTc.into() };
    }
    if !P::TC && ifindex != packet.ingress() && flags & HOP_XDP == 0 {
        return Outcome::PassedToTc.into();
    }
    inner.account(entry, now);
    let (macs, source_mac_tail) =
        if hop.is_null() { (0, 0) } else { (get!(hop.macs), get!(hop.source_mac_tail)) };
    let (source, destination) = (get!(entry.source), get!(entry.destination));
    let flags = flags & HOP_NO_ETHERNET;
    store(
        place!(mut scratch.outer),
        Outer { macs, source_mac_tail, ifindex, flags, number, source, destination },
    );
    let context = packet.raw();
    let action = if P::TC { send_tc4(context.cast()) } else { send_xdp4(context.cast()) };
    if action == REFUSED {
        return Outcome::DroppedInternalError.into();
    }
    Decision::sent(Outcome::ForwardedDirect, action)
}

/// The result of [`send`] if the kernel refused; none of its verdicts.
const REFUSED: i32 = i32::MIN;

global_functions! {
    send_xdp4 => send::<Xdp>, context: *mut xdp_md;
    send_tc4 => send::<Tc>, context: *mut __sk_buff;
}

/// Sends an IPv4 packet within the outer packet of `Scratch::outer`, and returns the verdict.
#[inline(always)]
fn send<P: Packet>(context: *mut P::Context) -> i32 {
    let Some(scratch) = V4::scratch() else { return REFUSED };
    let packet = P::of(context);
    if !wrap(packet, scratch) {
        return REFUSED;
    }
    let outer = place!(const scratch.outer);
    let ifindex = get!(outer.ifindex);
    if let Some(skb) = packet.skb() {
        if get!(outer.flags) & HOP_NO_ETHERNET != 0 {
            return skb.send_routed(ifindex);
        }
        if get!(outer.macs) == 0 {
            return skb.send_to(ifindex, place!(mut scratch.neighbour));
        }
    }
    packet.send(ifindex)
}

/// Puts the outer header of `Scratch::outer` in front of an IPv4 packet. False: the kernel refused.
#[inline(always)]
fn wrap<P: Packet>(packet: P, scratch: *const Scratch<Address4>) -> bool {
    if !packet.make_room(OUTER) && !make_room_again(packet, scratch) {
        return false;
    }
    let (data, end) = (packet.data(), packet.end());
    if data + parse::ETHERNET + 2 * OUTER as usize > end {
        return false;
    }
    let ip = data + parse::ETHERNET;
    let inner = ip + OUTER as usize;
    let outer = place!(const scratch.outer);
    let macs = get!(outer.macs);
    if macs != 0 || !P::TC {
        store64::<0>(data, macs);
        store32::<8>(data, get!(outer.source_mac_tail));
        store16::<12>(data, ETHERTYPE_IPV4);
    }
    let length = u16::from_be(load16::<2>(inner)).wrapping_add(OUTER as u16);
    let number = get!(outer.number) as u16;
    header(ip, load8::<1>(inner), length, number, get!(outer.source), get!(outer.destination));
    true
}

/// Returns the number for the outer packet that is being built, and forgets it.
#[inline(always)]
pub fn take_number<A: Address>(scratch: *mut Scratch<A>) -> u32 {
    let number = get!(scratch.owners.number);
    set!(scratch.owners.number = 0);
    number
}

/// Makes room for the outer header of a packet that was opened before: it may still be marked as
/// encapsulated, by a sender on this machine or by GRO, which the kernel does not do twice. The
/// mark and the offsets of the inner headers are those that it needs.
/// <https://github.com/torvalds/linux/blob/v6.12/net/core/filter.c> (`bpf_skb_net_grow`)
#[inline(always)]
fn make_room_again<P: Packet>(packet: P, scratch: *const Scratch<Address4>) -> bool {
    let was_opened = get!(scratch.outer.number) != 0;
    was_opened && packet.skb().is_some_and(|skb| skb.make_room_again(OUTER))
}

/// Writes the outer header. The type of service is the inner one, with the two bits of ECN
/// (RFC 6040 section 4.1). The identification, which has no other meaning in a packet that is never
/// fragmented (RFC 6864 section 4.1), is the number of owners that were asked before.
#[inline(always)]
fn header(ip: usize, tos: u8, length: u16, number: u16, source: Address4, destination: Address4) {
    let first = u16::from_ne_bytes([VERSION_AND_LENGTH, tos]);
    let time_and_protocol = u16::from_ne_bytes([TTL, PROTOCOL_IPIP]);
    let (length, number) = (length.to_be(), number.to_be());
    let (from, to) = (source.wire() as u64, destination.wire() as u64);
    let words =
        first as u64 + length as u64 + number as u64 + DONT_FRAGMENT as u64 + time_and_protocol as u64;
    let sum = words + (from >> 16) + (from & 0xffff) + (to >> 16) + (to & 0xffff);
    store16::<0>(ip, first);
    store16::<2>(ip, length);
    store16::<4>(ip, number);
    store16::<6>(ip, DONT_FRAGMENT);
    store16::<8>(ip, time_and_protocol);
    store16::<10>(ip, !fold(sum));
    store32::<12>(ip, source.wire());
    store32::<16>(ip, destination.wire());
}
