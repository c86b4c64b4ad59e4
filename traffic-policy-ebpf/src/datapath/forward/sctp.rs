//! Translation of ports and checksum of an SCTP packet.
//!
//! The CRC covers neither addresses nor a pseudo header (RFC 9260 section 6.8), so a translation
//! that keeps the ports leaves it as it is. Where the ports change, [`crc32c`] updates it.

use traffic_policy_ebpf::{
    abi::{Address, BY_MAC, DeviceOrPlace, Flow, HOP_NO_ETHERNET, HOP_ROUTED, Scratch, kind, way},
    checksum::{self, word_sum},
    crc32c,
    outcome::Outcome,
    sctp::HEADER,
};

use super::{
    Forwarding, Rewrite, device, direct, fragment,
    outer::{self, Outer},
};
use crate::datapath::{
    barrier::opaque,
    ctx::{BY_FRAGMENTS, Packet, Skb},
    forward,
    maps::{CONFIG, NEXTHOPS},
    parse::{ETHERNET, Parsed},
    verdict::Decision,
    words::{load32, store32},
};

/// The MTU in bytes that every device with IPv6 has at least, for one whose own is not known.
const LEAST: u32 = 1280;

global_functions! {
    sctp_checksum => checksum_difference, ports_and_length: u64;
    sctp_has_ethernet => has_ethernet, leaves_by: u64;
}

/// Computes [`crc32c::difference`]: the high half of the argument is the difference of the ports,
/// the low half the length.
#[inline(always)]
fn checksum_difference(ports_and_length: u64) -> i32 {
    crc32c::difference((ports_and_length >> 32) as u32, ports_and_length as u16).cast_signed()
}

/// Whether a packet is a first fragment whose ports are to change here. Its checksum cannot be
/// updated: the change depends on the length of the whole packet, which only the last fragment
/// reveals.
#[inline(always)]
pub fn is_cut<P: Packet, F: Rewrite>(parsed: &Parsed<F>, flow: *const Flow<F::Address>) -> bool {
    parsed.is_sctp::<P>()
        && fragment::is_one::<F>()
        && get!(flow.kind) != kind::DIRECT
        && get!(flow.ports) != parsed.tuple.ports
}

/// Whether a packet of a direct flow travels without an outer packet ([`send_translated`]).
///
/// - An aggregate of whole packets: the kernel puts no outer packet around it (`bpf_skb_net_grow`).
///   Only a host on the same machine sends one, and only virtual devices hand it on.
/// - A packet that leaves no room for an outer one, and whose port has to change. Told of a smaller
///   MTU, its sender would send the same chunks again in fragments, whose checksum nobody can
///   update ([`is_cut`]), until it gives the association up.
///
/// <https://github.com/torvalds/linux/blob/v6.12/net/core/filter.c>
/// <https://github.com/torvalds/linux/blob/v6.12/net/sctp/output.c> (`sctp_packet_transmit_chunk`)
#[inline(always)]
pub fn travels_translated<P: Packet, F: Outer>(
    packet: P,
    parsed: &Parsed<F>,
    forwarding: &Forwarding<F::Address>,
) -> bool {
    let entry = forwarding.entry;
    // XDP leaves to TC what is too long.
    if !P::TC || !P::SCTP || !direct::is_direct::<P, F>(entry) {
        return false;
    }
    if packet.segment() == BY_FRAGMENTS {
        return true;
    }
    if get!(entry.ports) == parsed.tuple.ports || fragment::is_one::<F>() {
        return false;
    }
    let hop = forwarding.hop;
    let (least, most) = if hop.is_null() { (LEAST, u32::MAX) } else { (get!(hop.mtu), get!(hop.mtu)) };
    let room = F::OUTER + outer::udp(get!(entry.port_delta) & !BY_MAC);
    parsed.length <= most && parsed.length + room > least
}

/// Whether a flow whose packets may have to travel [translated][travels_translated] cannot be
/// direct: its replies go back through the node in front, so the network takes no client's address
/// from this node; or its packets leave by a device without Ethernet. `hop`: the next hop's index;
/// 0: not resolved, behind the device `unresolved`.
#[inline(always)]
pub fn needs_snat<A: Address>(scratch: *const Scratch<A>, hop: u16, unresolved: u32) -> bool {
    let leaves_by = (hop as u64) << 32 | unresolved as u64;
    get!(scratch.direct) & way::TUNNEL != 0 || sctp_has_ethernet(leaves_by) == 0
}

/// Whether packets that leave by a hop, the high half of the argument, or if that is 0 by the
/// device of the low half, begin with an Ethernet header that the program writes.
#[inline(always)]
fn has_ethernet(leaves_by: u64) -> i32 {
    let hop = (leaves_by >> 32) as u32;
    let flags = if hop == 0 {
        device::find(leaves_by as u32).1
    } else {
        NEXTHOPS.get_ptr(hop).map_or(0, |hop| get!(hop.flags))
    };
    (flags & (HOP_ROUTED | HOP_NO_ETHERNET) == 0) as i32
}

/// Sends a packet to the endpoint as the endpoint's node would have translated it, with the
/// client's address as source. By the stored hop alone: until there is one, or where it has no
/// Ethernet, the packet is lost, and its sender retransmits it.
#[inline(always)]
pub fn send_translated<P: Packet, F: Rewrite>(
    packet: P,
    parsed: &Parsed<F>,
    forwarding: &Forwarding<F::Address>,
    now: u32,
) -> Decision {
    let (entry, hop) = (forwarding.entry, forwarding.hop);
    let Some(scratch) = F::scratch() else { return Outcome::DroppedInternalError.into() };
    if hop.is_null() || get!(hop.flags) & (HOP_ROUTED | HOP_NO_ETHERNET) != 0 {
        return Outcome::DroppedNoRoute.into();
    }
    if parsed.ttl <= 1 {
        return Outcome::RejectedTtlExceeded.into();
    }
    forward::account::<F>(entry, parsed.length, now);
    let (endpoint, ports) = (get!(entry.destination), get!(entry.ports));
    let (was, is) = (checksum::port_sum(parsed.tuple.ports), checksum::port_sum(ports));
    let translation = place!(mut scratch.reply);
    set!(translation.source = parsed.tuple.source);
    set!(translation.destination = endpoint);
    set!(translation.ports = ports);
    set!(translation.address_delta = checksum::delta(parsed.tuple.destination.sum(), endpoint.sum()));
    set!(translation.port_delta = checksum::delta(was, is));
    forward::macs(parsed.ip - ETHERNET, hop);
    F::addresses(parsed, translation, true);
    if !translate(packet, parsed, translation) {
        return Outcome::DroppedInternalError.into();
    }
    Decision::sent(Outcome::Forwarded, packet.send(get!(hop.ifindex)))
}

/// Whether a reply is an aggregate of packets that go back through the node in front. The kernel
/// puts no outer packet around it: see [`travels_translated`].
#[inline(always)]
pub fn is_undivided<P: Skb, F: Outer>(packet: P, entry: *const Flow<F::Address>) -> bool {
    P::SCTP && packet.segment() == BY_FRAGMENTS && get!(entry.device_or_place) == DeviceOrPlace::TUNNELLED
}

/// Whether a packet has come through the agent's device ([`divide`]).
#[inline(always)]
pub fn was_divided<P: Skb>(packet: P) -> bool {
    CONFIG.get_ptr(0).is_some_and(|config| get!(config.sctp_divided) == packet.ingress())
}

/// Returns the device by which a reply leaves by the route to the client: the one where it is, or
/// where it was before it was [divided][divide].
#[inline(always)]
pub fn leaves_by<P: Packet>(packet: P) -> u32 {
    let here = packet.ingress();
    let Some(skb) = packet.skb() else { return here };
    if !P::SCTP {
        return here;
    }
    // Both are read at offsets that are numbers in the program: the verifier takes no other ones
    // into the context.
    let number = opaque(skb.number() as u64) as u32;
    if was_divided(skb) { number } else { here }
}

/// Sends an aggregate as it is to the agent's device that cannot send one (`sctp_divider.rs` of the
/// agent): the kernel divides it, and the packets arrive at that device's peer, where they pass
/// this program as if they left here. Their flow is tracked there, and each counts as a reply, as
/// the aggregate does here. Without the device they are lost, and their sender retransmits them.
///
/// A packet that is too long takes the same way before it is answered: it may lack its checksum,
/// which the kernel completes at that device, and later would write into the answer.
#[inline(always)]
pub fn divide<P: Skb, F: Outer>(packet: P) -> Decision {
    let Some(config) = CONFIG.get_ptr(0) else { return Outcome::DroppedInternalError.into() };
    let divider = get!(config.sctp_divider);
    // Somebody may have given the device its offloads back: the packet would go round for ever.
    let here = packet.ingress();
    if divider == 0 || get!(config.sctp_divided) == here || divider == here {
        return Outcome::DroppedNoRoute.into();
    }
    packet.note_number(here);
    if P::L2 == 0 && !packet.push_ethernet(F::ETHERTYPE) {
        return Outcome::DroppedInternalError.into();
    }
    // Not marked as redirected: the packets have no translation yet.
    Decision::sent(Outcome::RepliedToFront, packet.send_or_receive(divider, 0))
}

/// Writes ports and checksum of a whole packet, or of a fragment that keeps its ports. Its
/// addresses have been written. False: the packet is too short.
///
/// A checksum field of 0 stays 0. The stack leaves it so for the device (`CHECKSUM_PARTIAL`), or
/// for the kernel itself where the device cannot compute it; both compute the CRC over a field that
/// has to be 0 (<https://github.com/torvalds/linux/blob/v6.12/net/core/dev.c>
/// skb_crc32c_csum_help). A true CRC of 0, one in 2^32, is not updated: that packet is lost, and
/// its sender retransmits it.
#[inline(always)]
pub fn translate<P: Packet, F: Rewrite>(
    packet: P,
    parsed: &Parsed<F>,
    flow: *const Flow<F::Address>,
) -> bool {
    if parsed.l4 + HEADER as usize > packet.end() {
        return false;
    }
    let (was, ports) = (load32::<0>(parsed.l4), get!(flow.ports).wire());
    let mut delta = if F::V6 { get!(flow.address_delta) } else { 0 };
    if was != ports {
        store32::<0>(parsed.l4, ports);
        delta = checksum::add(delta, get!(flow.port_delta));
        let sum = load32::<8>(parsed.l4);
        if sum != 0 {
            let length = parsed.length.saturating_sub(parsed.l4_offset) as u16;
            let changed = sum ^ sctp_checksum(((was ^ ports) as u64) << 32 | length as u64).cast_unsigned();
            store32::<8>(parsed.l4, changed);
            delta = checksum::add(delta, checksum::delta(word_sum(sum), word_sum(changed)));
        }
    }
    // The update for a device that has summed up the frame (CHECKSUM_COMPLETE).
    if let Some(skb) = packet.skb() {
        skb.update_sum(delta);
    }
    true
}
