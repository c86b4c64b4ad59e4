//! IPv6 extension headers: from the fixed header to the transport header.

use traffic_policy_ebpf::{
    abi::{ExtensionWalk, PROTOCOL_SCTP, PROTOCOL_TCP, PROTOCOL_UDP},
    outcome::Outcome,
};

use crate::datapath::{
    family::{Family, V6},
    value::{load_once, store_once},
    words::{load8, load16, load32},
};

const FIXED: usize = 40;
/// Packets with more extension headers are left to the stack: RFC 8504 section 5.3 lets a host set
/// such limits.
const MOST: usize = 8;
const MOST_BYTES: usize = 256;
/// The largest offset of the transport header from the IP header, in bytes.
pub const MAX_LENGTH: usize = FIXED + MOST_BYTES;
/// A mask of the power of two above every offset up to [`MAX_LENGTH`], including the eight bytes of
/// a fragment header after it.
const REACH_MASK: u32 = (MAX_LENGTH + 8).next_power_of_two() as u32 - 1;

const HOP_BY_HOP: u32 = 0;
const ROUTING: u32 = 43;
const FRAGMENT: u32 = 44;
const AUTHENTICATION: u32 = 51;
const DESTINATION: u32 = 60;

/// The offset, in the word that holds it and the flag for more fragments: RFC 8200 section 4.5.
pub const OFFSET: u32 = 0xfff8;
pub const MORE: u32 = 1;

/// Walks the extension headers of the packet at `ip`, up to TCP, UDP or SCTP, or to the data of a
/// later fragment.
///
/// The result is left in `Scratch` and read back: to the verifier all walks then end in the same
/// state, and it follows the code after them once instead of once for each.
///
/// # Errors
/// Other protocols, headers that cannot be skipped, and more headers than any host sends.
#[inline(always)]
pub fn walk(ip: usize, end: usize) -> Result<ExtensionWalk, Outcome> {
    let Some(scratch) = V6::scratch() else { return Err(Outcome::DroppedInternalError) };
    let walked = place!(mut scratch.walked);
    walk_to(walked, ip, end)?;
    let ExtensionWalk { protocol, offset, fragment, identification } = load_once(walked);
    // Restores a bound that the verifier has lost. The offset is masked before it is compared:
    // Linux 6.1 keeps no bound on a spilled number if only a copy of it was compared.
    let offset = offset & REACH_MASK;
    if offset > MAX_LENGTH as u32 {
        return Err(Outcome::PassedUnsupportedHeader);
    }
    Ok(ExtensionWalk { protocol, offset, fragment, identification })
}

#[inline(always)]
fn walk_to(walked: *mut ExtensionWalk, ip: usize, end: usize) -> Result<(), Outcome> {
    let mut protocol = load8::<6>(ip) as u32;
    let mut offset = FIXED;
    let (mut fragment, mut identification) = (0, 0);
    let mut fragmented = false;
    for _ in 0..=MOST {
        if offset > MAX_LENGTH {
            return Err(Outcome::PassedUnsupportedHeader);
        }
        if protocol == PROTOCOL_TCP || protocol == PROTOCOL_UDP || protocol == PROTOCOL_SCTP {
            let end = ExtensionWalk { protocol, offset: offset as u32, fragment, identification };
            store_once(walked, end);
            return Ok(());
        }
        let at = ip + offset;
        if at + 8 > end {
            return Err(Outcome::PassedMalformed);
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
                    return Ok(());
                }
            }
            ROUTING | FRAGMENT | AUTHENTICATION => return Err(Outcome::PassedUnsupportedHeader),
            _ => return Err(Outcome::PassedUnsupportedProtocol),
        }
        protocol = load8::<0>(at) as u32;
        offset += length;
    }
    Err(Outcome::PassedUnsupportedHeader)
}
