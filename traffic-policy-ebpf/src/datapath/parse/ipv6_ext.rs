//! IPv6 extension headers: from the fixed header to the transport header.

use traffic_policy_ebpf::{
    abi::{ExtensionWalk, PROTOCOL_SCTP, PROTOCOL_TCP, PROTOCOL_UDP},
    outcome::Outcome,
};

use crate::datapath::{
    barrier::opaque,
    ctx::Packet,
    family::{Family, V6},
    value::{load_once, store_once},
    words::{load8, load16, load32},
};

/// The bytes of the fixed header.
pub const FIXED: usize = 40;
/// Packets with more extension headers are left to the stack: RFC 8504 section 5.3 lets a host set
/// such limits.
const MOST: usize = 8;
const MOST_BYTES: usize = 256;
/// The largest offset of the transport header from the IP header, in bytes.
pub const MAX_LENGTH: usize = FIXED + MOST_BYTES;
/// A mask of the power of two above every offset up to [`MAX_LENGTH`], including the eight bytes of
/// a fragment header after it.
const REACH_MASK: u32 = (MAX_LENGTH + 8).next_power_of_two() as u32 - 1;

/// A mask for the distance of an IP header from the beginning of its frame, for the verifier: more
/// than that of one which an ICMP error quotes.
const MOST_BEFORE_IP: u64 = 127;

const HOP_BY_HOP: u32 = 0;
const ROUTING: u32 = 43;
const FRAGMENT: u32 = 44;
const AUTHENTICATION: u32 = 51;
const DESTINATION: u32 = 60;

/// The offset, in the word that holds it and the flag for more fragments: RFC 8200 section 4.5.
pub const OFFSET: u32 = 0xfff8;
pub const MORE: u32 = 1;

/// Walks the extension headers of the packet whose IP header is at `offset` of the frame, up to
/// TCP, UDP or SCTP, or to the data of a later fragment. Pointers into the packet stay valid.
///
/// # Errors
/// Other protocols, headers that cannot be skipped, and more headers than any host sends.
#[inline(always)]
pub fn walk<P: Packet>(packet: P, offset: usize) -> Result<ExtensionWalk, Outcome> {
    let Some(scratch) = V6::scratch() else { return Err(Outcome::DroppedInternalError) };
    match packet.walk_headers(offset as u32) {
        FOUND => {}
        MALFORMED => return Err(Outcome::PassedMalformed),
        OTHER_PROTOCOL => return Err(Outcome::PassedUnsupportedProtocol),
        _ => return Err(Outcome::PassedUnsupportedHeader),
    }
    let ExtensionWalk { protocol, offset, fragment, identification } =
        load_once(place!(const scratch.walked));
    let offset = within_reach(offset as u64)?;
    Ok(ExtensionWalk { protocol, offset, fragment, identification })
}

/// Restores a bound of the transport header's offset that the verifier does not know. The offset is
/// masked before it is compared: Linux 6.1 keeps no bound on a spilled number if only a copy of it
/// was compared.
///
/// # Errors
/// It is beyond the bound.
#[inline(always)]
pub fn within_reach(offset: u64) -> Result<u32, Outcome> {
    let offset = offset as u32 & REACH_MASK;
    if offset > MAX_LENGTH as u32 { Err(Outcome::PassedUnsupportedHeader) } else { Ok(offset) }
}

/// The results of [`walk_headers`].
const FOUND: i32 = 0;
const MALFORMED: i32 = 1;
const OTHER_PROTOCOL: i32 = 2;
const OTHER_HEADER: i32 = 3;

/// Walks the headers behind the IP header at `offset` of the frame, and leaves the end of the walk
/// in `Scratch::walked`.
#[inline(always)]
pub fn walk_headers<P: Packet>(packet: P, offset: u32) -> i32 {
    let Some(scratch) = V6::scratch() else { return MALFORMED };
    let walked = place!(mut scratch.walked);
    let (ip, end) = (packet.data() + (opaque(offset as u64) & MOST_BEFORE_IP) as usize, packet.end());
    if ip + FIXED > end {
        return MALFORMED;
    }
    let mut protocol = load8::<6>(ip) as u32;
    let mut offset = FIXED;
    let (mut fragment, mut identification) = (0, 0);
    let mut fragmented = false;
    for _ in 0..=MOST {
        if offset > MAX_LENGTH {
            return OTHER_HEADER;
        }
        if protocol == PROTOCOL_TCP || protocol == PROTOCOL_UDP || protocol == PROTOCOL_SCTP {
            let end = ExtensionWalk { protocol, offset: offset as u32, fragment, identification };
            store_once(walked, end);
            return FOUND;
        }
        let at = ip + offset;
        if at + 8 > end {
            return MALFORMED;
        }
        let mut length = (load8::<1>(at) as usize + 1) * 8;
        match protocol {
            HOP_BY_HOP | DESTINATION => {}
            // With segments left the destination is an intermediate stop, and not the address that
            // the checksum covers: RFC 8200 section 8.1.
            ROUTING if load8::<3>(at) == 0 => {}
            FRAGMENT if !fragmented => {
                fragmented = true;
                fragment = u16::from_be(load16::<2>(at)) as u32 & (OFFSET | MORE);
                identification = load32::<4>(at);
                length = 8;
                if fragment & OFFSET != 0 {
                    let end =
                        ExtensionWalk { protocol: 0, offset: offset as u32 + 8, fragment, identification };
                    store_once(walked, end);
                    return FOUND;
                }
            }
            ROUTING | FRAGMENT | AUTHENTICATION => return OTHER_HEADER,
            _ => return OTHER_PROTOCOL,
        }
        protocol = load8::<0>(at) as u32;
        offset += length;
    }
    OTHER_HEADER
}
