//! Translation of ports and checksum of an SCTP packet.
//!
//! Its CRC covers neither addresses nor a pseudo header (RFC 9260 section 6.8), so a translation that keeps the ports costs
//! nothing. [`crc32c`] says how it follows where they change.

use traffic_policy_ebpf::{
    abi::Flow,
    checksum::{self, word_sum},
    crc32c,
    sctp::HEADER,
};

use super::{Rewrite, fragment};
use crate::datapath::{
    ctx::Packet,
    parse::Parsed,
    words::{load32, store32},
};

global_functions! {
    sctp_checksum => checksum_difference, ports_and_length: u64;
}

/// [`crc32c::difference`], of the difference in the high half and the length in the low one.
#[inline(always)]
fn checksum_difference(ports_and_length: u64) -> i32 {
    crc32c::difference((ports_and_length >> 32) as u32, ports_and_length as u16).cast_signed()
}

/// Whether it is the first fragment of a packet whose ports are to change: how far they are from its end, and so how its checksum
/// changes, only the last fragment tells.
#[inline(always)]
pub fn is_cut<P: Packet, F: Rewrite>(parsed: &Parsed<F>, flow: *const Flow<F::Address>) -> bool {
    parsed.is_sctp::<P>() && fragment::is_one::<F>() && get!(flow.ports) != parsed.tuple.ports
}

/// Writes ports and checksum of a whole packet, or of a fragment that keeps its ports. Its addresses have been written. False: it
/// is too short.
///
/// A field of 0 stays as it is. A socket of this machine leaves it so for the device, or for the kernel where it hands the packet
/// to one that cannot (`CHECKSUM_PARTIAL`): there it has to be 0, or be lost in the sum
/// (<https://github.com/torvalds/linux/blob/v6.12/net/core/dev.c> skb_crc32c_csum_help). That a true sum is 0 happens once in
/// 2^32 packets, and the packet is one that its sender sends again.
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
            let length = (parsed.length - parsed.l4_offset) as u16;
            let changed = sum ^ sctp_checksum(((was ^ ports) as u64) << 32 | length as u64).cast_unsigned();
            store32::<8>(parsed.l4, changed);
            delta = checksum::add(delta, checksum::delta(word_sum(sum), word_sum(changed)));
        }
    }
    // Of a device that has summed up the frame.
    packet.update_sum(delta);
    true
}
