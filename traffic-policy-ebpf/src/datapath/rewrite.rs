//! The translation of one packet. Everything has been decided; from here on failure means drop.

use traffic_policy_ebpf::{
    abi::{Address4, Flow, Hop},
    checksum::{self, TTL_STEP},
};

use crate::datapath::{
    ctx::Packet,
    family::{V4, V6},
    parse::{Parse, Parsed},
    words::{load16, store8, store16, store32, store64},
};

/// A family whose headers can be rewritten.
pub trait Rewrite: Parse {
    /// Writes addresses, and where `hop` steps the TTL, with all that the IP header's own checksum needs.
    ///
    /// # Safety
    /// `parsed` holds for the packet as it is.
    unsafe fn addresses(parsed: &Parsed<Self>, flow: *const Flow<Self::Address>, step: bool);
}

impl Rewrite for V4 {
    #[inline(always)]
    unsafe fn addresses(parsed: &Parsed<Self>, flow: *const Flow<Address4>, step: bool) {
        unsafe {
            let delta = (*flow).address_delta;
            // Both addresses at once: they lie in the half as they do in the header.
            store64::<12>(parsed.ip, flow.cast::<u64>().read());
            let delta = if step {
                store8::<8>(parsed.ip, parsed.ttl - 1);
                checksum::add(delta, TTL_STEP)
            } else {
                delta
            };
            store16::<10>(parsed.ip, checksum::update(load16::<10>(parsed.ip), delta));
        }
    }
}

impl Rewrite for V6 {
    #[inline(always)]
    unsafe fn addresses(parsed: &Parsed<Self>, flow: *const Flow<[u64; 2]>, step: bool) {
        unsafe {
            let (source, destination) = ((*flow).source, (*flow).destination);
            store64::<8>(parsed.ip, source[0]);
            store64::<16>(parsed.ip, source[1]);
            store64::<24>(parsed.ip, destination[0]);
            store64::<32>(parsed.ip, destination[1]);
            if step {
                store8::<7>(parsed.ip, parsed.ttl - 1);
            }
        }
    }
}

/// Writes the frame's MAC addresses.
///
/// # Safety
/// The Ethernet header has been compared with the end of the packet.
#[inline(always)]
pub unsafe fn macs(data: usize, hop: *const Hop) {
    unsafe {
        store64::<0>(data, (*hop).macs);
        store32::<8>(data, (*hop).source_mac_tail);
    }
}

/// Translates addresses, ports and checksums as `flow` says. False: the kernel refused, the packet is spoilt.
#[inline(always)]
#[must_use]
pub fn translate<P: Packet, F: Rewrite>(
    packet: P,
    parsed: &Parsed<F>,
    flow: *const Flow<F::Address>,
    step: bool,
) -> bool {
    unsafe {
        let (address_delta, port_delta) = ((*flow).address_delta, (*flow).port_delta);
        F::addresses(parsed, flow, step);
        store32::<0>(parsed.l4, (*flow).ports);
        if P::TC {
            let offset = parsed.l4_offset + if parsed.is_tcp() { 16 } else { 6 };
            return packet.fix_checksum(offset, address_delta, port_delta, !parsed.is_tcp(), F::V6);
        }
        let delta = checksum::add(address_delta, port_delta);
        if parsed.is_tcp() {
            store16::<16>(parsed.l4, checksum::update(load16::<16>(parsed.l4), delta));
        } else {
            store16::<6>(parsed.l4, checksum::update_udp(load16::<6>(parsed.l4), delta));
        }
        true
    }
}
