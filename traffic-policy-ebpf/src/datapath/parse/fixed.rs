//! Headers where nearly all packets have them: IPv4 without options, IPv6 without extension
//! headers. Every offset is a constant of the program. Also the lengths, of which all headers must
//! say the same.

use traffic_policy_ebpf::{
    abi::{Address4, Address6, PROTOCOL_SCTP, PROTOCOL_TCP, PROTOCOL_UDP, Ports, Tuple},
    outcome::Outcome,
    sctp,
};

use crate::datapath::{
    barrier::opaque,
    ctx::Packet,
    family::{Family, V4, V6},
    parse::{Parse, Parsed},
    words::{load8, load16, load32, load64},
};

/// The bits for more fragments, or for an offset: RFC 791 section 3.1. Memory order.
pub const FRAGMENT: u16 = 0x3fffu16.to_be();

pub const PROTOCOL_ICMP: u8 = 1;
/// IPv4 within IPv4: RFC 2003.
pub const PROTOCOL_IPIP: u8 = 4;
/// IPv6 within IPv6: RFC 2473.
pub const PROTOCOL_IPV6: u8 = 41;
pub const PROTOCOL_ICMP6: u8 = 58;

/// Returns 1 for TCP and 0 for UDP; `None` if the packet ends within the header.
///
/// The numbers belong to the ways that the test of the length took: the verifier of Linux 6.1 does
/// not see that a protocol which is read again from the stack is still the one that was tested.
#[inline(always)]
pub fn tcp(protocol: u32, l4: usize, end: usize) -> Option<u64> {
    if protocol != PROTOCOL_TCP {
        return Some(opaque(0));
    }
    if l4 + 20 > end {
        return None;
    }
    Some(opaque(1))
}

impl Parse for V4 {
    #[inline(always)]
    fn parse_fixed<P: Packet>(packet: P) -> Result<Parsed<Self>, Outcome> {
        let (ip, end) = (packet.data() + P::L2, packet.end());
        if ip + 28 > end {
            return Err(short4(ip, end));
        }
        if load16::<6>(ip) & FRAGMENT != 0 {
            return Err(Outcome::PassedFragment);
        }
        let protocol = load8::<9>(ip) as u32;
        if protocol != PROTOCOL_TCP && protocol != PROTOCOL_UDP {
            return Err(other(protocol));
        }
        let first = load8::<0>(ip);
        if first != 0x45 {
            // The header has options.
            let valid = matches!(first, 0x46..=0x4f);
            return Err(if valid { Outcome::PassedUnsupportedHeader } else { Outcome::PassedMalformed });
        }
        let l4 = ip + 20;
        let Some(tcp) = tcp(protocol, l4, end) else { return Err(Outcome::PassedMalformed) };
        let (source, destination) = Self::addresses_at(ip);
        let tuple = Tuple { source, destination, ports: Ports::from_wire(load32::<0>(l4)), protocol };
        let length = u16::from_be(load16::<2>(ip)) as u32;
        Ok(Parsed { tuple, ip, l4, l4_offset: 20, length, ttl: load8::<8>(ip), tcp })
    }

    #[inline(always)]
    fn is_icmp_error<P: Packet>(packet: P) -> bool {
        let (ip, end) = (packet.data() + P::L2, packet.end());
        if ip + 20 > end {
            return false;
        }
        let icmp = ip + ((load8::<0>(ip) as usize & 15) << 2);
        if load8::<9>(ip) != PROTOCOL_ICMP || icmp + 8 > end {
            return false;
        }
        // Destination unreachable, time exceeded, parameter problem (RFC 792). Excluded are source
        // quench, which hosts must ignore (RFC 6633), and redirect, which concerns the next hop
        // alone.
        matches!(load8::<0>(icmp), 3 | 11 | 12)
    }

    #[inline(always)]
    fn holds_packet<P: Packet>(packet: P) -> bool {
        let ip = packet.data() + P::L2;
        ip + 20 <= packet.end() && load8::<9>(ip) == PROTOCOL_IPIP
    }

    #[inline(always)]
    fn addresses_at(ip: usize) -> (Address4, Address4) {
        (Address4::from_wire(load32::<12>(ip)), Address4::from_wire(load32::<16>(ip)))
    }
}

impl Parse for V6 {
    #[inline(always)]
    fn parse_fixed<P: Packet>(packet: P) -> Result<Parsed<Self>, Outcome> {
        let (ip, end) = (packet.data() + P::L2, packet.end());
        let l4 = ip + 40;
        if l4 + 8 > end {
            return Err(Outcome::PassedMalformed);
        }
        if load8::<0>(ip) >> 4 != 6 {
            return Err(Outcome::PassedMalformed);
        }
        let protocol = load8::<6>(ip) as u32;
        if protocol != PROTOCOL_TCP && protocol != PROTOCOL_UDP {
            return Err(match protocol {
                // Hop-by-hop, routing, destination options, authentication, and below fragment:
                // RFC 8200 section 4.
                0 | 43 | 51 | 60 => Outcome::PassedUnsupportedHeader,
                44 => Outcome::PassedFragment,
                _ => other(protocol),
            });
        }
        let Some(tcp) = tcp(protocol, l4, end) else { return Err(Outcome::PassedMalformed) };
        let (source, destination) = Self::addresses_at(ip);
        let tuple = Tuple { source, destination, ports: Ports::from_wire(load32::<0>(l4)), protocol };
        let length = u16::from_be(load16::<4>(ip)) as u32 + 40;
        Ok(Parsed { tuple, ip, l4, l4_offset: 40, length, ttl: load8::<7>(ip), tcp })
    }

    #[inline(always)]
    fn is_icmp_error<P: Packet>(packet: P) -> bool {
        let ip = packet.data() + P::L2;
        if ip + 48 > packet.end() {
            return false;
        }
        // Types below 128 are errors; these four are defined: RFC 4443 section 3.
        load8::<6>(ip) == PROTOCOL_ICMP6 && matches!(load8::<40>(ip), 1..=4)
    }

    #[inline(always)]
    fn holds_packet<P: Packet>(packet: P) -> bool {
        let ip = packet.data() + P::L2;
        ip + 40 <= packet.end() && load8::<6>(ip) == PROTOCOL_IPV6
    }

    #[inline(always)]
    fn addresses_at(ip: usize) -> (Address6, Address6) {
        (
            Address6::from_wire([load64::<8>(ip), load64::<16>(ip)]),
            Address6::from_wire([load64::<24>(ip), load64::<32>(ip)]),
        )
    }
}

/// Returns the outcome for another protocol. SCTP is left to the program for headers of variable
/// length, so that other packets bear no cost for it.
#[inline(always)]
fn other(protocol: u32) -> Outcome {
    if protocol == PROTOCOL_SCTP {
        Outcome::PassedUnsupportedHeader
    } else {
        Outcome::PassedUnsupportedProtocol
    }
}

/// Returns the outcome for a frame that is too short for ports.
#[inline(always)]
fn short4(ip: usize, end: usize) -> Outcome {
    if ip + 20 > end {
        return Outcome::PassedMalformed;
    }
    match (load8::<9>(ip) as u32, load16::<6>(ip) & FRAGMENT) {
        (_, 1..) => Outcome::PassedFragment,
        (PROTOCOL_TCP | PROTOCOL_UDP | PROTOCOL_SCTP, 0) => Outcome::PassedMalformed,
        _ => Outcome::PassedUnsupportedProtocol,
    }
}

/// Checks that the lengths in the headers agree with each other and with the frame: the IP lengths,
/// and the data offset of TCP. The whole fixed TCP header must be readable.
#[inline(always)]
pub fn finish<P: Packet, F: Family>(packet: P, parsed: &Parsed<F>) -> Result<(), Outcome> {
    let fits = lengths_agree(packet, parsed, |length| packet.holds(length));
    if fits { Ok(()) } else { Err(Outcome::PassedMalformed) }
}

/// Checks that an IP packet of `length` bytes lies in the first buffer of its frame. It serves rare
/// packets: XDP leaves those in several buffers to TC.
///
/// # Errors
/// The outcome of passing.
#[inline(always)]
pub fn in_one_buffer<P: Packet>(packet: P, length: u32) -> Result<(), Outcome> {
    if in_first_buffer(packet, length) {
        return Ok(());
    }
    Err(if !P::TC && packet.holds(P::L2 as u32 + length) {
        Outcome::PassedToTc
    } else {
        Outcome::PassedMalformed
    })
}

/// Whether the lengths agree as in [`finish`], and the IP packet lies in the first buffer of its
/// frame.
#[inline(always)]
pub fn is_whole<P: Packet, F: Family>(packet: P, parsed: &Parsed<F>) -> bool {
    lengths_agree(packet, parsed, |length| length <= packet.length())
}

/// Whether an IP packet of `length` bytes ends in the first buffer of its frame.
#[inline(always)]
pub fn in_first_buffer<P: Packet>(packet: P, length: u32) -> bool {
    length <= packet.length() - P::L2 as u32
}

#[inline(always)]
fn lengths_agree<P: Packet, F: Family>(packet: P, parsed: &Parsed<F>, holds: impl Fn(u32) -> bool) -> bool {
    let header = if parsed.is_tcp() {
        load8::<12>(parsed.l4) as u32 >> 4 << 2
    } else if parsed.is_sctp::<P>() {
        sctp::WITH_CHUNK
    } else {
        8
    };
    if parsed.is_tcp() && header < 20 {
        return false;
    }
    let least = parsed.l4_offset + header;
    // The length field of an aggregate of more than 65,535 bytes is 0 (BIG TCP, RFC 2675 for IPv6):
    // only TC sees one.
    let jumbo = P::TC && packet.segment() != 0;
    jumbo || parsed.length >= least && holds(P::L2 as u32 + parsed.length)
}
