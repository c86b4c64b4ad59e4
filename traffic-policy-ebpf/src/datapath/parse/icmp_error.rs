//! ICMP errors: the outer packet and the packet embedded in it.

use traffic_policy_ebpf::{
    abi::{Address4, Address6, PROTOCOL_SCTP, PROTOCOL_TCP, PROTOCOL_UDP, Ports, Tuple},
    outcome::Outcome,
};

use crate::datapath::{
    barrier::opaque,
    ctx::Packet,
    family::{Family, V4, V6},
    parse::{self, Parse, fixed, ipv6_ext},
    words::{load8, load16, load32, load64},
};

const ICMP: usize = 8;
/// The bytes of an error that are read, from the IP header on: both IP headers at their longest,
/// the ICMP header, and a quoted TCP header up to its checksum.
const PULL4: usize = 60 + ICMP + 60 + 18;
const PULL6: usize = 40 + ICMP + ipv6_ext::MAX_LENGTH + 18;

/// An ICMP error, and the packet that it quotes.
pub struct IcmpError<F: Family> {
    /// The tuple of packets in the error's direction: that of the quoted packet, reversed.
    pub tuple: Tuple<F::Address>,
    pub ip: usize,
    pub icmp: usize,
    /// The quoted IP header, and the transport header after it.
    pub quoted: usize,
    pub l4: usize,
    /// Whether the quoted packet is TCP, see [`parse::is_tcp`], and whether the quote includes the
    /// checksum.
    pub tcp: u64,
    pub tcp_sum: u64,
    /// The length in bytes of the IP packet.
    pub length: u32,
    pub ttl: u8,
}

/// A family whose ICMP errors can be read.
pub trait ParseIcmpError: Parse {
    /// Parses an ICMP error.
    ///
    /// # Errors
    /// The outcome of passing, if the packet is no error about a packet of TCP, UDP or SCTP, or is
    /// cut too short to tell.
    fn parse_icmp_error<P: Packet>(packet: P) -> Result<IcmpError<Self>, Outcome>;
}

impl ParseIcmpError for V4 {
    #[inline(always)]
    fn parse_icmp_error<P: Packet>(packet: P) -> Result<IcmpError<Self>, Outcome> {
        packet.pull((P::L2 + PULL4) as u32);
        let (data, end) = (packet.data(), packet.end());
        let ip = data + P::L2;
        if ip + 20 > end {
            return Err(Outcome::PassedMalformed);
        }
        let first = load8::<0>(ip);
        let header = opaque((first as u64 & 15) << 2) as usize;
        let length = u16::from_be(load16::<2>(ip)) as u32;
        if !matches!(first, 0x45..=0x4f) {
            return Err(Outcome::PassedMalformed);
        }
        fixed::in_one_buffer(packet, length)?;
        let icmp = ip + header;
        let quoted = icmp + ICMP;
        if quoted + 20 > end {
            return Err(Outcome::PassedMalformed);
        }
        let first = load8::<0>(quoted);
        let inner = opaque((first as u64 & 15) << 2) as usize;
        let protocol = load8::<9>(quoted) as u32;
        // Only the first fragment has the ports.
        if first >> 4 != 4
            || inner < 20
            || protocol != PROTOCOL_TCP && protocol != PROTOCOL_UDP && protocol != PROTOCOL_SCTP
            || load16::<6>(quoted) & 0x1fffu16.to_be() != 0
        {
            return Err(Outcome::PassedIcmpNoFlow);
        }
        let l4 = quoted + inner;
        let at = (header + ICMP + inner) as u32;
        // RFC 792: at least eight bytes.
        if l4 + 8 > end || at + 8 > length {
            return Err(Outcome::PassedMalformed);
        }
        let tuple = Tuple {
            source: Address4::from_wire(load32::<16>(quoted)),
            destination: Address4::from_wire(load32::<12>(quoted)),
            ports: Ports::from_wire(load32::<0>(l4)).reversed(),
            protocol,
        };
        let tcp_sum = (at + 18 <= length) as u64;
        let ttl = load8::<8>(ip);
        Ok(IcmpError { tuple, ip, icmp, quoted, l4, tcp: parse::is_tcp(protocol), tcp_sum, length, ttl })
    }
}

impl ParseIcmpError for V6 {
    #[inline(always)]
    fn parse_icmp_error<P: Packet>(packet: P) -> Result<IcmpError<Self>, Outcome> {
        packet.pull((P::L2 + PULL6) as u32);
        let (data, end) = (packet.data(), packet.end());
        let ip = data + P::L2;
        let icmp = ip + 40;
        let quoted = icmp + ICMP;
        if quoted + 40 > end {
            return Err(Outcome::PassedMalformed);
        }
        let length = u16::from_be(load16::<4>(ip)) as u32 + 40;
        fixed::in_one_buffer(packet, length)?;
        if load8::<0>(quoted) >> 4 != 6 {
            return Err(Outcome::PassedIcmpNoFlow);
        }
        let walked = match ipv6_ext::walk(packet, P::L2 + 40 + ICMP) {
            Ok(walked) if walked.fragment & ipv6_ext::OFFSET == 0 => walked,
            Err(Outcome::PassedMalformed) => return Err(Outcome::PassedMalformed),
            _ => return Err(Outcome::PassedIcmpNoFlow),
        };
        let l4 = opaque((quoted + walked.offset as usize) as u64) as usize;
        let at = (40 + ICMP) as u32 + walked.offset;
        if l4 + 8 > end || at + 8 > length {
            return Err(Outcome::PassedMalformed);
        }
        let tuple = Tuple {
            source: Address6::from_wire([load64::<24>(quoted), load64::<32>(quoted)]),
            destination: Address6::from_wire([load64::<8>(quoted), load64::<16>(quoted)]),
            ports: Ports::from_wire(load32::<0>(l4)).reversed(),
            protocol: walked.protocol,
        };
        let tcp_sum = (at + 18 <= length) as u64;
        let ttl = load8::<7>(ip);
        let tcp = parse::is_tcp(walked.protocol);
        Ok(IcmpError { tuple, ip, icmp, quoted, l4, tcp, tcp_sum, length, ttl })
    }
}
