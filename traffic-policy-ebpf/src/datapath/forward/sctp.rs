//! Translation of ports and checksum of an SCTP packet.
//!
//! The CRC covers neither addresses nor a pseudo header (RFC 9260 section 6.8), so a translation
//! that keeps the ports leaves it as it is. Where the ports change, [`crc32c`] updates it.

use traffic_policy_ebpf::{
    abi::{Address as _, Flow, HOP_NO_ETHERNET, HOP_ROUTED, kind},
    checksum::{self, word_sum},
    crc32c,
    outcome::Outcome,
    sctp::HEADER,
};

use super::{Forwarding, Rewrite, direct, fragment};
use crate::datapath::{
    ctx::{BY_FRAGMENTS, Packet, Skb as _},
    forward,
    parse::{ETHERNET, Parsed},
    verdict::Decision,
    words::{load32, store32},
};

global_functions! {
    sctp_checksum => checksum_difference, ports_and_length: u64;
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

/// Whether a packet is an aggregate of whole packets of a direct flow, around which the kernel puts
/// no outer packet (`bpf_skb_net_grow`). Only a host on the same machine sends one, and only
/// virtual devices hand it on. <https://github.com/torvalds/linux/blob/v6.12/net/core/filter.c>
#[inline(always)]
pub fn is_direct_aggregate<P: Packet, F: Rewrite>(packet: P, entry: *const Flow<F::Address>) -> bool {
    P::TC && P::SCTP && packet.segment() == BY_FRAGMENTS && direct::is_direct::<P, F>(entry)
}

/// Sends such an aggregate to the endpoint as the endpoint's node would have translated its
/// packets, with the client's address as source. By the stored hop alone: until there is one, or
/// where it has no Ethernet, the packets are lost, and their sender retransmits them.
#[inline(always)]
pub fn send_aggregate<P: Packet, F: Rewrite>(
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
