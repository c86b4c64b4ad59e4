//! From bytes to a tuple, with every bounds check that later code relies on.

use network_types::eth::{EthHdr, EtherType};
use traffic_policy_ebpf::{
    abi::{PROTOCOL_TCP, PROTOCOL_UDP, Tuple},
    outcome::Outcome,
    tcp,
};

use crate::datapath::{
    barrier::opaque,
    ctx::Packet,
    family::{Family, V4, V6},
    words::{load8, load16, load32, load64},
};

pub const ETHERNET: usize = EthHdr::LEN;
/// Memory order, as loaded.
pub const ETHERTYPE_IPV4: u16 = EtherType::Ipv4 as u16;
pub const ETHERTYPE_IPV6: u16 = EtherType::Ipv6 as u16;

/// More fragments, or an offset: RFC 791 section 3.1. Memory order.
const FRAGMENT: u16 = 0x3fffu16.to_be();

const PROTOCOL_ICMP: u8 = 1;
const PROTOCOL_ICMP6: u8 = 58;

/// A TCP or UDP packet whose fixed headers can be read and written.
#[derive(Clone, Copy)]
pub struct Parsed<F: Family> {
    pub tuple: Tuple<F::Address>,
    /// First byte of the IP header.
    pub ip: usize,
    /// First byte of the transport header, and its distance from the start of the frame.
    pub l4: usize,
    pub l4_offset: u32,
    /// Bytes of the IP packet, headers included.
    pub length: u32,
    /// TTL or hop limit.
    pub ttl: u8,
    /// 1 for TCP, 0 for UDP, see [`opaque`].
    pub tcp: u64,
}

impl<F: Family> Parsed<F> {
    #[inline(always)]
    pub fn is_tcp(&self) -> bool {
        self.tcp != 0
    }

    /// Flags byte of the TCP header; 0 for UDP.
    #[inline(always)]
    pub fn tcp_flags(&self) -> u8 {
        if self.is_tcp() { unsafe { load8::<13>(self.l4) } } else { 0 }
    }

    /// Whether a TCP segment opens a connection.
    #[inline(always)]
    pub fn opens(&self) -> bool {
        tcp::opens(self.tcp_flags())
    }

    /// Whether a TCP segment carries data.
    #[inline(always)]
    pub fn payload(&self) -> bool {
        let header = (unsafe { load8::<12>(self.l4) } >> 4) as u32 * 4;
        self.length > self.l4_offset - ETHERNET as u32 + header
    }

    /// Bytes of the hop-by-hop header by which the kernel tells the length of an IPv6 aggregate of more than 65,535 bytes (RFC
    /// 2675): its segments do not have it (`ipv6_hopopt_jumbo_remove`).
    /// <https://github.com/torvalds/linux/blob/v6.1/include/net/ipv6.h>
    #[inline(always)]
    fn jumbo(&self) -> u32 {
        // The first next header and the payload length.
        let jumbo = F::V6 && unsafe { load8::<6>(self.ip) == 0 && load16::<4>(self.ip) == 0 };
        if jumbo { 8 } else { 0 }
    }

    /// Bytes of the longest IP packet that this becomes on the wire.
    #[inline(always)]
    pub fn wire_length<P: Packet>(&self, packet: P) -> u32 {
        let segment = packet.segment();
        if segment == 0 {
            return self.length;
        }
        let header = if self.is_tcp() { (unsafe { load8::<12>(self.l4) } >> 4) as u32 * 4 } else { 8 };
        self.l4_offset - ETHERNET as u32 - self.jumbo() + header + segment
    }
}

/// A family whose packets can be parsed.
pub trait Parse: Family + Sized {
    /// Reads a packet whose headers are where nearly all have them, so that every offset is a number in the program: the
    /// ports, and of TCP the whole fixed header. [`finish`] checks what they say.
    ///
    /// # Errors
    /// How it passes. What can be read nevertheless, elsewhere, is [`Outcome::PassedFragment`] or
    /// [`Outcome::PassedUnsupportedHeader`].
    fn headers<P: Packet>(packet: P) -> Result<Parsed<Self>, Outcome>;
    /// Whether a packet of another protocol is an ICMP error, by its type.
    fn is_error<P: Packet>(packet: P) -> bool;
}

impl Parse for V4 {
    #[inline(always)]
    fn headers<P: Packet>(packet: P) -> Result<Parsed<Self>, Outcome> {
        let (ip, end) = (packet.data() + ETHERNET, packet.end());
        if ip + 28 > end {
            return Err(short4(ip, end));
        }
        unsafe {
            if load16::<6>(ip) & FRAGMENT != 0 {
                return Err(Outcome::PassedFragment);
            }
            let protocol = load8::<9>(ip) as u32;
            if protocol != PROTOCOL_TCP && protocol != PROTOCOL_UDP {
                return Err(Outcome::PassedUnsupportedProtocol);
            }
            let first = load8::<0>(ip);
            if first != 0x45 {
                // With options.
                let valid = matches!(first, 0x46..=0x4f);
                return Err(if valid { Outcome::PassedUnsupportedHeader } else { Outcome::PassedMalformed });
            }
            let l4 = ip + 20;
            if protocol == PROTOCOL_TCP && l4 + 20 > end {
                return Err(Outcome::PassedMalformed);
            }
            let tuple = Tuple {
                source: load32::<12>(ip),
                destination: load32::<16>(ip),
                ports: load32::<0>(l4),
                protocol,
            };
            let length = u16::from_be(load16::<2>(ip)) as u32;
            Ok(Parsed {
                tuple,
                ip,
                l4,
                l4_offset: (ETHERNET + 20) as u32,
                length,
                ttl: load8::<8>(ip),
                tcp: is_tcp(protocol),
            })
        }
    }

    #[inline(always)]
    fn is_error<P: Packet>(packet: P) -> bool {
        let (ip, end) = (packet.data() + ETHERNET, packet.end());
        if ip + 20 > end {
            return false;
        }
        unsafe {
            let icmp = ip + ((load8::<0>(ip) as usize & 15) << 2);
            if load8::<9>(ip) != PROTOCOL_ICMP || icmp + 8 > end {
                return false;
            }
            // Destination unreachable, time exceeded, parameter problem (RFC 792). Not source quench, which nobody may
            // act on (RFC 6633), nor redirect, which is about the next hop alone.
            matches!(load8::<0>(icmp), 3 | 11 | 12)
        }
    }
}

impl Parse for V6 {
    #[inline(always)]
    fn headers<P: Packet>(packet: P) -> Result<Parsed<Self>, Outcome> {
        let (ip, end) = (packet.data() + ETHERNET, packet.end());
        let l4 = ip + 40;
        if l4 + 8 > end {
            return Err(Outcome::PassedMalformed);
        }
        unsafe {
            if load8::<0>(ip) >> 4 != 6 {
                return Err(Outcome::PassedMalformed);
            }
            let protocol = load8::<6>(ip) as u32;
            if protocol != PROTOCOL_TCP && protocol != PROTOCOL_UDP {
                return Err(match protocol {
                    // Hop-by-hop, routing, fragment, destination options, authentication: RFC 8200 section 4.
                    0 | 43 | 51 | 60 => Outcome::PassedUnsupportedHeader,
                    44 => Outcome::PassedFragment,
                    _ => Outcome::PassedUnsupportedProtocol,
                });
            }
            if protocol == PROTOCOL_TCP && l4 + 20 > end {
                return Err(Outcome::PassedMalformed);
            }
            let tuple = Tuple {
                source: [load64::<8>(ip), load64::<16>(ip)],
                destination: [load64::<24>(ip), load64::<32>(ip)],
                ports: load32::<0>(l4),
                protocol,
            };
            let length = u16::from_be(load16::<4>(ip)) as u32 + 40;
            Ok(Parsed {
                tuple,
                ip,
                l4,
                l4_offset: (ETHERNET + 40) as u32,
                length,
                ttl: load8::<7>(ip),
                tcp: is_tcp(protocol),
            })
        }
    }

    #[inline(always)]
    fn is_error<P: Packet>(packet: P) -> bool {
        let ip = packet.data() + ETHERNET;
        if ip + 48 > packet.end() {
            return false;
        }
        // Types below 128 are errors; these four are defined: RFC 4443 section 3.
        unsafe { load8::<6>(ip) == PROTOCOL_ICMP6 && matches!(load8::<40>(ip), 1..=4) }
    }
}

#[inline(always)]
pub fn is_tcp(protocol: u32) -> u64 {
    opaque((protocol == PROTOCOL_TCP) as u64)
}

/// What a frame is that is too short for ports.
#[inline(always)]
fn short4(ip: usize, end: usize) -> Outcome {
    if ip + 20 > end {
        return Outcome::PassedMalformed;
    }
    match unsafe { (load8::<9>(ip) as u32, load16::<6>(ip) & FRAGMENT) } {
        (_, 1..) => Outcome::PassedFragment,
        (PROTOCOL_TCP | PROTOCOL_UDP, 0) => Outcome::PassedMalformed,
        _ => Outcome::PassedUnsupportedProtocol,
    }
}

/// Checks that the lengths in the headers agree with each other and with the frame. The whole fixed TCP header can be read.
#[inline(always)]
pub fn finish<P: Packet, F: Family>(packet: P, parsed: &Parsed<F>) -> Result<(), Outcome> {
    if parsed.is_tcp() && unsafe { load8::<12>(parsed.l4) } < 5 << 4 {
        return Err(Outcome::PassedMalformed);
    }
    let least = parsed.l4_offset - ETHERNET as u32 + if parsed.is_tcp() { 20 } else { 8 };
    // An aggregate of more than 65,535 bytes says 0 (BIG TCP, RFC 2675 for IPv6): only TC sees one.
    let jumbo = P::TC && packet.segment() != 0;
    if !jumbo && (parsed.length < least || parsed.length > packet.length() - ETHERNET as u32) {
        return Err(Outcome::PassedMalformed);
    }
    Ok(())
}
