//! Headers of variable length: IPv4 with options, IPv6 with extension headers, and fragments.

use traffic_policy_ebpf::{
    abi::{PROTOCOL_SCTP, PROTOCOL_TCP, PROTOCOL_UDP, Ports, Tuple},
    outcome::Outcome,
};

use crate::datapath::{
    barrier::opaque,
    ctx::Packet,
    family::{Family, V4, V6},
    parse::{
        self, Parse, Parsed,
        fixed::{self, FRAGMENT},
        ipv6_ext::{self, MORE, OFFSET},
    },
    value::load_once,
    words::{load8, load16, load32, load64},
};

/// The headers of a packet. In a later fragment, ports are not known and the transport header must
/// not be touched.
pub struct VariableHeaders<F: Family> {
    pub parsed: Parsed<F>,
    /// 1 for a fragment, first or later: see [`opaque`].
    pub fragmented: u64,
    /// 1 for a later fragment.
    pub later: u64,
    /// The identification field, in memory order.
    pub identification: u32,
}

/// A family whose irregular packets can be read.
pub trait ParseVariable: Parse {
    /// Reads headers of variable length.
    ///
    /// # Errors
    /// [`Outcome::PassedMalformed`] if a header is cut off or the lengths disagree; the outcome of
    /// passing for other protocols than TCP, UDP and SCTP, and for extension headers that are not
    /// walked.
    fn parse_variable<P: Packet>(packet: P) -> Result<VariableHeaders<Self>, Outcome>;
    /// Looks for an option that only the stack may accept: a source route.
    ///
    /// # Errors
    /// [`Outcome::PassedUnsupportedHeader`] for a source route, [`Outcome::PassedMalformed`] for
    /// options that exceed the header.
    fn check_options<P: Packet>(packet: P, parsed: &Parsed<Self>) -> Result<(), Outcome>;
    /// Reads a packet that [`Parse::parse_fixed`] has read in another program, or that has come
    /// through the program for headers of variable length. The number is 0 unless it is a fragment,
    /// which is a first one then.
    ///
    /// # Errors
    /// [`Outcome::PassedMalformed`] if the packet ends within the headers; IPv6: the outcome of
    /// passing if they hold neither TCP nor UDP, or exceed what the verifier lets be read.
    fn parse_again<P: Packet>(packet: P) -> Result<(Parsed<Self>, u64), Outcome>;
}

/// Loose and strict source route: RFC 791 section 3.1.
const LSRR: u8 = 131;
const SSRR: u8 = 137;

impl ParseVariable for V4 {
    #[inline(always)]
    fn parse_variable<P: Packet>(packet: P) -> Result<VariableHeaders<Self>, Outcome> {
        let (ip, end) = (packet.data() + P::L2, packet.end());
        if ip + 20 > end {
            return Err(Outcome::PassedMalformed);
        }
        let first = load8::<0>(ip);
        if !matches!(first, 0x45..=0x4f) {
            return Err(Outcome::PassedMalformed);
        }
        let header = opaque((first as u64 & 15) << 2) as usize;
        let protocol = load8::<9>(ip) as u32;
        let field = u16::from_be(load16::<2>(ip)) as u32;
        // That of an aggregate of more than 65,535 bytes is 0 (BIG TCP): only TC sees one.
        let jumbo = P::TC && field == 0 && packet.segment() != 0;
        let length = if jumbo { packet.length() - P::L2 as u32 } else { field };
        if protocol != PROTOCOL_TCP && protocol != PROTOCOL_UDP && protocol != PROTOCOL_SCTP {
            return Err(Outcome::PassedFragment);
        }
        if length <= header as u32 {
            return Err(Outcome::PassedMalformed);
        }
        fixed::in_one_buffer(packet, length)?;
        // The fields of RFC 791 section 3.1 in the positions of those of IPv6.
        let word = u16::from_be(load16::<6>(ip)) as u32;
        let fragment = (word & 0x1fff) << 3 | (word >> 13) & MORE;
        let l4 = ip + header;
        let later = opaque((fragment & OFFSET != 0) as u64);
        if later == 0 && l4 + 8 > end {
            return Err(Outcome::PassedMalformed);
        }
        let (source, destination) = Self::addresses_at(ip);
        let tuple = Tuple {
            source,
            destination,
            ports: if later != 0 { Ports::NONE } else { Ports::from_wire(load32::<0>(l4)) },
            protocol,
        };
        let fragmented = opaque((fragment != 0) as u64);
        let parsed = Parsed {
            tuple,
            ip,
            l4,
            l4_offset: header as u32,
            length,
            ttl: load8::<8>(ip),
            tcp: if P::SCTP { 0 } else { parse::is_tcp(protocol) },
        };
        Ok(VariableHeaders { parsed, fragmented, later, identification: load16::<4>(ip) as u32 })
    }

    #[inline(always)]
    fn check_options<P: Packet>(packet: P, parsed: &Parsed<Self>) -> Result<(), Outcome> {
        match packet.check_options(parsed.l4_offset) {
            ALLOWED => Ok(()),
            SOURCE_ROUTED => Err(Outcome::PassedUnsupportedHeader),
            _ => Err(Outcome::PassedMalformed),
        }
    }

    #[inline(always)]
    fn parse_again<P: Packet>(packet: P) -> Result<(Parsed<Self>, u64), Outcome> {
        let (ip, end) = (packet.data() + P::L2, packet.end());
        if ip + 28 > end {
            return Err(Outcome::PassedMalformed);
        }
        let fragmented = opaque((load16::<6>(ip) & FRAGMENT) as u64);
        let header = opaque((load8::<0>(ip) as u64 & 15) << 2) as usize;
        let protocol = load8::<9>(ip) as u32;
        let length = u16::from_be(load16::<2>(ip)) as u32;
        let place = Place { ip, header, protocol, length, ttl: load8::<8>(ip) };
        Ok((place.parsed(end)?, fragmented))
    }
}

/// The results of [`check_options`].
const ALLOWED: i32 = 0;
const SOURCE_ROUTED: i32 = 1;
const MALFORMED: i32 = 2;

/// Reads the options of an IPv4 header of `header` bytes.
#[inline(always)]
pub fn check_options<P: Packet>(packet: P, header: u32) -> i32 {
    let (ip, end) = (packet.data() + P::L2, packet.end());
    let header = (opaque(header as u64) & 63) as u32;
    let mut offset = 20;
    for _ in 0..40 {
        // The verifier knows nothing else about this value, so it walks one turn for all.
        let at = (opaque(offset) & 63) as u32;
        if at >= header {
            break;
        }
        let option = ip + at as usize;
        // At least one byte follows the header.
        if option + 2 > end {
            return MALFORMED;
        }
        let kind = load8::<0>(option);
        if kind == 0 {
            break;
        }
        if kind == 1 {
            offset = at as u64 + 1;
            continue;
        }
        let length = load8::<1>(option) as u32;
        if at + 1 >= header || length < 2 || at + length > header {
            return MALFORMED;
        }
        if kind == LSRR || kind == SSRR {
            return SOURCE_ROUTED;
        }
        offset = (at + length) as u64;
    }
    ALLOWED
}

impl ParseVariable for V6 {
    #[inline(always)]
    fn parse_variable<P: Packet>(packet: P) -> Result<VariableHeaders<Self>, Outcome> {
        packet.pull((P::L2 + ipv6_ext::MAX_LENGTH + 20) as u32);
        let walked = ipv6_ext::walk(packet, P::L2)?;
        let (ip, end) = (packet.data() + P::L2, packet.end());
        if ip + 40 > end {
            return Err(Outcome::PassedMalformed);
        }
        let length = u16::from_be(load16::<4>(ip)) as u32 + 40;
        fixed::in_one_buffer(packet, length)?;
        let l4 = opaque((ip + walked.offset as usize) as u64) as usize;
        let later = opaque((walked.fragment & OFFSET != 0) as u64);
        if later == 0 && l4 + 8 > end {
            return Err(Outcome::PassedMalformed);
        }
        let (source, destination) = Self::addresses_at(ip);
        let tuple = Tuple {
            source,
            destination,
            ports: if later != 0 { Ports::NONE } else { Ports::from_wire(load32::<0>(l4)) },
            protocol: walked.protocol,
        };
        let fragmented = opaque((walked.fragment != 0) as u64);
        let parsed = Parsed {
            tuple,
            ip,
            l4,
            l4_offset: walked.offset,
            length,
            ttl: load8::<7>(ip),
            tcp: if P::SCTP { 0 } else { parse::is_tcp(walked.protocol) },
        };
        Ok(VariableHeaders { parsed, fragmented, later, identification: walked.identification })
    }

    /// Nothing to check: a routing header with segments left is not walked, see [`ipv6_ext`].
    #[inline(always)]
    fn check_options<P: Packet>(_: P, _: &Parsed<Self>) -> Result<(), Outcome> {
        Ok(())
    }

    #[inline(always)]
    fn parse_again<P: Packet>(packet: P) -> Result<(Parsed<Self>, u64), Outcome> {
        let (ip, end) = (packet.data() + P::L2, packet.end());
        if ip + 48 > end {
            return Err(Outcome::PassedMalformed);
        }
        // The result is 0, but the verifier takes it for any number. So a header of 40 bytes is no
        // constant to it, and it walks the rest of the program once for both cases.
        let word = load64::<0>(ip);
        let zero = word ^ opaque(word);
        let (mut protocol, mut header, mut fragment) =
            (load8::<6>(ip) as u32, ipv6_ext::FIXED as u64 + zero, zero as u32);
        if protocol != PROTOCOL_TCP && protocol != PROTOCOL_UDP {
            let Some(scratch) = V6::scratch() else { return Err(Outcome::DroppedInternalError) };
            let walked = load_once(place!(const scratch.walked));
            (protocol, header, fragment) = (walked.protocol, walked.offset as u64, walked.fragment);
            if protocol != PROTOCOL_TCP && protocol != PROTOCOL_UDP {
                return Err(Outcome::PassedUnsupportedProtocol);
            }
        }
        let header = ipv6_ext::within_reach(opaque(header))? as usize;
        let fragmented = opaque(fragment as u64);
        let length = u16::from_be(load16::<4>(ip)) as u32 + 40;
        let place =
            Place { ip, header: opaque(header as u64) as usize, protocol, length, ttl: load8::<7>(ip) };
        Ok((place.parsed(end)?, fragmented))
    }
}

/// An IP header and its fields.
struct Place {
    /// The header's first byte.
    ip: usize,
    /// The number of bytes from there to the transport header.
    header: usize,
    protocol: u32,
    /// The length in bytes of the IP packet, headers included.
    length: u32,
    ttl: u8,
}

impl Place {
    /// Reads the transport header: TCP or UDP.
    #[inline(always)]
    fn parsed<F: Parse>(self, end: usize) -> Result<Parsed<F>, Outcome> {
        let Self { ip, header, protocol, length, ttl } = self;
        let l4 = ip + header;
        if l4 + 8 > end {
            return Err(Outcome::PassedMalformed);
        }
        let Some(tcp) = fixed::tcp(protocol, l4, end) else { return Err(Outcome::PassedMalformed) };
        let (source, destination) = F::addresses_at(ip);
        let tuple = Tuple { source, destination, ports: Ports::from_wire(load32::<0>(l4)), protocol };
        Ok(Parsed { tuple, ip, l4, l4_offset: header as u32, length, ttl, tcp })
    }
}
