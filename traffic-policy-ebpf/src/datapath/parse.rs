//! The parsed packet: its tuple and its offsets, with every bounds check that later code relies on.

pub mod fixed;
pub mod icmp_error;
pub mod ipv6_ext;
pub mod variable;

use traffic_policy_ebpf::{
    abi::{PROTOCOL_TCP, Tuple, jump},
    outcome::Outcome,
    sctp,
    tcp::{self, flag, numbers::Segment},
};

use network_types::eth::{EthHdr, EtherType};

use crate::datapath::{
    barrier::opaque,
    ctx::{BY_FRAGMENTS, Packet},
    family::Family,
    verdict::Decision,
    words::{load8, load16, load32, load64},
};

pub const ETHERNET: usize = EthHdr::LEN;
/// EtherTypes in memory order, as loaded.
pub const ETHERTYPE_IPV4: u16 = EtherType::Ipv4 as u16;
pub const ETHERTYPE_IPV6: u16 = EtherType::Ipv6 as u16;

/// Kinds of TCP options: <https://www.iana.org/assignments/tcp-parameters>. At most [`TCP_OPTIONS`]
/// are examined; a SYN has room for 40 bytes, and hosts send up to five options and as many
/// fillers.
const OPTION_END: u8 = 0;
const OPTION_NOP: u8 = 1;
const OPTION_WINDOW_SCALE: u8 = 3;
const TCP_OPTIONS: u32 = 12;
/// A mask for the distance of a TCP header from the beginning of its frame, for the verifier: more
/// than any headers before it that a program reads.
const MOST_BEFORE_TCP: u64 = 1023;

/// A TCP, UDP or SCTP packet whose fixed headers can be read and written.
#[derive(Clone, Copy)]
pub struct Parsed<F: Family> {
    pub tuple: Tuple<F::Address>,
    /// The first byte of the IP header.
    pub ip: usize,
    /// The first byte of the transport header, and its distance from the IP header.
    pub l4: usize,
    pub l4_offset: u32,
    /// The length in bytes of the IP packet, headers included.
    pub length: u32,
    /// The TTL or hop limit.
    pub ttl: u8,
    /// 1 for TCP, otherwise 0; see [`opaque`].
    pub tcp: u64,
}

impl<F: Family> Parsed<F> {
    #[inline(always)]
    pub fn is_tcp(&self) -> bool {
        self.tcp != 0
    }

    /// Whether the packet is SCTP, which has programs of its own, so that the test is free for
    /// others.
    #[inline(always)]
    pub fn is_sctp<P: Packet>(&self) -> bool {
        P::SCTP
    }

    /// Whether the packet is UDP, which has neither connections nor associations.
    #[inline(always)]
    pub fn is_udp<P: Packet>(&self) -> bool {
        !self.is_tcp() && !self.is_sctp::<P>()
    }

    /// The flags byte of the TCP header; 0 for other protocols.
    #[inline(always)]
    pub fn tcp_flags(&self) -> u8 {
        if self.is_tcp() { load8::<13>(self.l4) } else { 0 }
    }

    /// Whether the packet opens a connection or an association.
    #[inline(always)]
    pub fn opens<P: Packet>(&self, packet: P) -> bool {
        if self.is_sctp::<P>() {
            return self.head(packet).opens(self.length.saturating_sub(self.l4_offset));
        }
        tcp::opens(self.tcp_flags())
    }

    /// Whether the packet ends a connection or an association, or begins to.
    #[inline(always)]
    pub fn ends<P: Packet>(&self, packet: P) -> bool {
        if self.is_sctp::<P>() {
            return self.head(packet).ends();
        }
        self.tcp_flags() & (flag::FIN | flag::RST) != 0
    }

    /// Returns tag and first chunk of an SCTP packet that is no aggregate; a head without a tag,
    /// which fits no flow, if the packet is too short for them.
    #[inline(always)]
    pub fn head<P: Packet>(&self, packet: P) -> sctp::Head {
        if self.l4 + sctp::WITH_CHUNK as usize > packet.end() {
            return sctp::Head::default();
        }
        sctp::Head::of(load32::<4>(self.l4), load32::<12>(self.l4))
    }

    /// Returns tag and first chunk as [`Self::head`] does, also for an aggregate, which begins with
    /// data or a COOKIE ECHO.
    #[inline(always)]
    pub fn head_of_any<P: Packet>(&self, packet: P) -> sctp::Head {
        if self.l4 + sctp::HEADER as usize > packet.end() {
            return sctp::Head::default();
        }
        let chunk = if self.l4 + sctp::WITH_CHUNK as usize > packet.end() {
            packet.distant_word(P::L2 as u32 + self.l4_offset + sctp::HEADER)
        } else {
            load32::<12>(self.l4)
        };
        // No chunk has length 0.
        if chunk == 0 { sctp::Head::default() } else { sctp::Head::of(load32::<4>(self.l4), chunk) }
    }

    /// Returns the initiate tag of an INIT or INIT ACK; 0, which is no valid tag, if the packet is
    /// too short for one.
    #[inline(always)]
    pub fn initiate_tag<P: Packet>(&self, packet: P) -> u32 {
        if self.l4 + 20 > packet.end() { 0 } else { load32::<16>(self.l4) }
    }

    /// Returns flags, numbers and length of a TCP segment. (The length of an aggregate of more than
    /// 65,535 bytes, whose length field is 0, is not known.)
    #[inline(always)]
    pub fn segment(&self) -> Segment {
        let header = (load8::<12>(self.l4) >> 4) as u32 * 4;
        Segment {
            flags: self.tcp_flags(),
            numbers: u64::from_be(load64::<4>(self.l4)),
            length: self.length.saturating_sub(self.l4_offset + header),
        }
    }

    /// Returns the window scale that a SYN or SYN-ACK offers (RFC 7323 section 2.2); `None` without
    /// that option, or after an option without a valid length.
    #[inline(always)]
    pub fn window_scale<P: Packet>(&self, packet: P) -> Option<u8> {
        let scale = packet.window_scale(P::L2 as u32 + self.l4_offset);
        if scale >= 0 { Some(scale as u8) } else { None }
    }

    /// Returns the bytes of the hop-by-hop header by which the kernel encodes the length of an IPv6
    /// aggregate of more than 65,535 bytes (RFC 2675): its segments do not have it
    /// (`ipv6_hopopt_jumbo_remove`).
    /// <https://github.com/torvalds/linux/blob/v6.1/include/net/ipv6.h>
    #[inline(always)]
    pub fn jumbo(&self) -> u32 {
        // The first next header and the payload length.
        let jumbo = F::V6 && (load8::<6>(self.ip) == 0 && load16::<4>(self.ip) == 0);
        if jumbo { 8 } else { 0 }
    }

    /// Returns the length in bytes of the longest IP packet that this one becomes on the wire.
    #[inline(always)]
    pub fn wire_length<P: Packet>(&self, packet: P) -> u32 {
        let segment = packet.segment();
        if segment == 0 {
            return self.length;
        }
        if self.is_sctp::<P>() && segment == BY_FRAGMENTS {
            // The sender has cut the packets to fit the path.
            return self.l4_offset;
        }
        let header = if self.is_tcp() { (load8::<12>(self.l4) >> 4) as u32 * 4 } else { 8 };
        self.l4_offset - self.jumbo() + header + segment
    }
}

/// The result of [`window_scale`] without a window scale.
const NO_SCALE: i32 = -1;

/// Returns the window scale that the TCP header at `offset` of the frame has among its options, or
/// [`NO_SCALE`].
#[inline(always)]
pub fn window_scale<P: Packet>(packet: P, offset: u32) -> i32 {
    let l4 = packet.data() + (opaque(offset as u64) & MOST_BEFORE_TCP) as usize;
    if l4 + 20 > packet.end() {
        return NO_SCALE;
    }
    let header = (load8::<12>(l4) >> 4) as usize * 4;
    let mut at = 20;
    let mut turn = 0;
    while turn < TCP_OPTIONS {
        turn += 1;
        // The bytes of the option that are read: its kind, its length, and the value of a window
        // scale.
        let option = l4 + opaque(at as u64 & 63) as usize;
        if at >= header || option + 3 > packet.end() {
            return NO_SCALE;
        }
        match (load8::<0>(option), load8::<1>(option)) {
            (OPTION_END, _) => return NO_SCALE,
            (OPTION_NOP, _) => at += 1,
            (OPTION_WINDOW_SCALE, 3) => return load8::<2>(option) as i32,
            (_, 0 | 1) => return NO_SCALE,
            (_, length) => at += length as usize,
        }
    }
    NO_SCALE
}

/// A family whose packets can be parsed.
pub trait Parse: Family + Sized {
    /// Reads a packet whose headers are where nearly all packets have them, so that every offset is
    /// a constant of the program: the ports, and for TCP the whole fixed header. [`fixed::finish`]
    /// checks their contents.
    ///
    /// # Errors
    /// The outcome of passing. A packet that another program can read is
    /// [`Outcome::PassedFragment`] or [`Outcome::PassedUnsupportedHeader`].
    fn parse_fixed<P: Packet>(packet: P) -> Result<Parsed<Self>, Outcome>;
    /// Returns source and destination of the IP header at `ip`.
    fn addresses_at(ip: usize) -> (Self::Address, Self::Address);
    /// Whether a packet of another protocol holds a packet of this family.
    fn holds_packet<P: Packet>(packet: P) -> bool;
    /// Whether a packet of another protocol is an ICMP error, by its type.
    fn is_icmp_error<P: Packet>(packet: P) -> bool;
}

#[inline(always)]
pub fn is_tcp(protocol: u32) -> u64 {
    opaque((protocol == PROTOCOL_TCP) as u64)
}

/// Continues with the program that opens packets: in XDP, which leaves requests to TC, with that
/// for replies. Returns only if it is missing.
#[inline(always)]
pub fn to_open<P: Packet, F: Family>(packet: P) {
    if P::TC {
        packet.jump::<F, { jump::OPEN }>();
    } else {
        packet.jump::<F, { jump::OPEN_REPLY }>();
    }
}

/// Hands an irregular packet, incoming or outgoing, to the program that can read it. A packet that
/// is neither an ICMP error, nor a fragment, nor has extension headers gets its outcome.
#[inline(always)]
pub fn hand_over<P: Packet, F: Parse, const OUT: bool>(packet: P, outcome: Outcome) -> Decision {
    match outcome {
        Outcome::PassedFragment | Outcome::PassedUnsupportedHeader if OUT => {
            packet.jump::<F, { jump::VARIABLE_HEADERS_OUT }>();
        }
        Outcome::PassedFragment | Outcome::PassedUnsupportedHeader => {
            packet.jump::<F, { jump::VARIABLE_HEADERS }>();
        }
        Outcome::PassedUnsupportedProtocol if F::is_icmp_error(packet) => {
            if OUT {
                packet.jump::<F, { jump::ICMP_ERROR_OUT }>();
            } else {
                packet.jump::<F, { jump::ICMP_ERROR }>();
            }
        }
        Outcome::PassedUnsupportedProtocol if !OUT && F::holds_packet(packet) => {
            to_open::<P, F>(packet);
            return outcome.into();
        }
        _ => return outcome.into(),
    }
    Outcome::PassedMissedTailCall.into()
}
