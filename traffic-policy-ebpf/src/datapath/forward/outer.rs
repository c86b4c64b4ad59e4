//! The headers of an outer packet: IPv4 within IPv4 (RFC 2003), IPv6 within IPv6 (RFC 2473), or
//! either within UDP as well (GUE of variant 1, which has no header of its own). A packet travels
//! in one of its own family, without options and extension headers.
//!
//! The checksum of UDP is 0, none, also in IPv6, which allows that in tunnels (RFC 6935, RFC 6936):
//! the packet inside has its own, which the endpoint checks, and names the addresses that count.

use traffic_policy_ebpf::{
    abi::{
        Address4, Address6, GUE_PORT, PROTOCOL_SCTP, PROTOCOL_TCP, PROTOCOL_UDP, Port, Ports, identification,
        is_outer_port, number_of,
    },
    checksum::{self, TTL_STEP, fold},
    outcome::Outcome,
};

use crate::datapath::{
    ctx::{LINEAR, Packet, Skb as _},
    family::{Family, V4, V6},
    forward::Rewrite,
    parse::{
        ETHERNET, ETHERTYPE_IPV4, ETHERTYPE_IPV6,
        fixed::{PROTOCOL_ICMP, PROTOCOL_ICMP6, PROTOCOL_IPIP, PROTOCOL_IPV6},
    },
    value::load,
    words::{load8, load16, load32, store8, store16, store32, store64},
};

/// The protocols of inner packets with ports, as IP headers have them.
const INNER_TCP: u8 = PROTOCOL_TCP as u8;
const INNER_UDP: u8 = PROTOCOL_UDP as u8;
const INNER_SCTP: u8 = PROTOCOL_SCTP as u8;
/// Version and header length of IPv4.
const VERSION_AND_LENGTH: u8 = 0x45;
/// The TTL or hop limit of outer packets.
const TTL: u8 = 64;
/// The outer packet is never fragmented: packets that are too long are refused.
const DONT_FRAGMENT: u16 = 0x4000u16.to_be();
/// The bits for more fragments, or for an offset, memory order.
const FRAGMENT: u16 = 0x3fffu16.to_be();
/// Congestion experienced, which is also the mask of both bits: RFC 3168 section 5. In IPv4's
/// second byte, and in that of IPv6, where the lower four bits belong to the flow label.
const CE4: u8 = 3;
const CE6: u8 = CE4 << 4;

/// The bytes of a UDP header.
pub const UDP: u32 = 8;

/// Returns the bytes of the UDP header of an outer packet with this source port: 0 if it has none.
#[inline(always)]
pub fn udp(port: u16) -> u32 {
    ((port != 0) as u32) << UDP.trailing_zeros()
}

/// Writes the UDP header at `l4`, in front of a packet of `length` bytes.
#[inline(always)]
pub fn udp_header(l4: usize, port: u16, length: u16) {
    store32::<0>(l4, Ports::new(Port::from_wire(port), GUE_PORT).wire());
    store16::<4>(l4, length.wrapping_add(UDP as u16).to_be());
    store16::<6>(l4, 0);
}

/// Whether the UDP header at `l4`, in front of a packet of `length` bytes, is one that
/// [`udp_header`] could have written. The checksum may have been completed on the way.
#[inline(always)]
pub fn is_udp_header(l4: usize, length: u16) -> bool {
    let ports = Ports::from_wire(load32::<0>(l4));
    ports.destination() == GUE_PORT
        && is_outer_port(ports.source())
        && load16::<4>(l4) == length.wrapping_add(UDP as u16).to_be()
}

/// A packet that another node may have sent, by its outer IP header.
pub struct FromNode<F: Outer> {
    /// The outer IP header, and the first byte after what can be read.
    pub ip: usize,
    pub end: usize,
    pub destination: F::Address,
    /// The number of the node that has sent it.
    pub node: u32,
    pub is_udp: bool,
}

impl<F: Outer> FromNode<F> {
    /// Reads the outer header of a packet that another node may have sent, and makes those inside
    /// readable.
    ///
    /// # Errors
    /// The outcome of passing: it is none, or its source is no address of another node.
    #[inline(always)]
    pub fn read<P: Packet>(packet: P) -> Result<Self, Outcome> {
        packet.pull(LINEAR + 2 * F::OUTER + UDP);
        let (ip, end) = (packet.data() + ETHERNET, packet.end());
        if ip + 2 * F::OUTER as usize > end || !F::is_outer(ip) {
            return Err(Outcome::PassedUnsupportedProtocol);
        }
        let (source, destination) = F::addresses_at(ip);
        let is_udp = F::protocol(ip) as u32 == PROTOCOL_UDP;
        let Some(node) = F::direct_from().lookup::<_, u32>(&source) else { return Err(left_alone(is_udp)) };
        Ok(Self { ip, end, destination, node: load(node), is_udp })
    }

    /// The outcome of passing.
    #[inline(always)]
    pub fn left_alone(&self) -> Outcome {
        left_alone(self.is_udp)
    }

    /// The bytes of the outer headers.
    #[inline(always)]
    pub fn outer(&self) -> u32 {
        F::OUTER + if self.is_udp { UDP } else { 0 }
    }
}

/// Whether an address is one from which another node sends outer packets.
#[inline(always)]
pub fn is_node<F: Family>(address: F::Address) -> bool {
    F::direct_from().lookup::<_, u32>(&address).is_some()
}

#[inline(always)]
fn left_alone(is_udp: bool) -> Outcome {
    if is_udp { Outcome::Passed } else { Outcome::PassedUnsupportedProtocol }
}

/// The bits of the fourth byte of an outer IPv6 header that count owners, and
/// [`REPLY_THROUGH_FRONT`][traffic_policy_ebpf::abi::REPLY_THROUGH_FRONT].
const NUMBER6: u8 = 7;

/// Returns a protocol, or that of UDP if the packet has this source port: by a number that is
/// computed without a branch.
#[inline(always)]
pub fn either(protocol: u8, port: u16) -> u8 {
    protocol.wrapping_add((port != 0) as u8 * (PROTOCOL_UDP as u8).wrapping_sub(protocol))
}

/// The bytes of the transport header at `l4`.
#[inline(always)]
fn transport(protocol: u8, l4: usize, end: usize) -> u32 {
    if protocol != INNER_TCP || l4 + 13 > end {
        return UDP;
    }
    load8::<12>(l4) as u32 >> 4 << 2
}

/// A family whose packets can travel in outer packets.
pub trait Outer: Rewrite {
    /// The bytes of the outer IP header.
    const OUTER: u32;
    const ETHERTYPE: u16;

    /// Decrements `ttl`, that of the header at `ip`, which is more than 0.
    fn step(ip: usize, ttl: u8);
    /// Whether the header at `ip` is one that [`Self::header`] could have written.
    fn is_outer(ip: usize) -> bool;
    /// The protocol that the header at `ip` names.
    fn protocol(ip: usize) -> u8;
    /// The length that the header at `ip` gives its packet, modulo 2^16.
    fn length(ip: usize) -> u16;
    /// Whether what follows the header at `ip` begins with ports.
    fn has_ports(ip: usize) -> bool;
    /// Whether the packet at `ip`, which was in an outer one, is of this family and of a protocol
    /// whose programs conclude it.
    fn is_inner(ip: usize) -> bool;
    /// Whether a router on the way of the packet at `ip` was congested.
    fn is_marked(ip: usize) -> bool;
    /// Notes in the packet at `ip`, the first of `packet`, that a router was congested: RFC 6040
    /// section 4.2.
    fn mark<P: Packet>(packet: P, ip: usize);
    /// TTL or hop limit of the header at `ip`.
    fn ttl(ip: usize) -> u8;
    /// Whether the packet at `ip`, without options, is an ICMP error, whose header is at `icmp`.
    fn is_error(ip: usize, icmp: usize, end: usize) -> bool;
    /// The bytes of the headers that each segment of an aggregate at `ip` gets.
    fn headers(ip: usize, end: usize) -> u32;
    /// The number of owners that were asked before, and
    /// [`REPLY_THROUGH_FRONT`][traffic_policy_ebpf::abi::REPLY_THROUGH_FRONT], in the header at
    /// `ip`.
    fn number(ip: usize) -> u32;
    /// Writes the outer IP header in front of the packet at `inner`, and of a UDP header if that
    /// has the source port `port`. Returns the packet's length. The type of service is the inner
    /// one, with the two bits of ECN (RFC 6040 section 4.1). `number`, at most 7: see
    /// [`Self::number`]. `aggregate`: whether the packet may be one of segments, whose IPv4 header
    /// has the length 0 if they have more than 65,535 bytes together (BIG TCP); so has the outer
    /// one.
    /// <https://github.com/torvalds/linux/blob/v6.12/include/linux/ip.h> (`iph_totlen`)
    fn header(
        ip: usize,
        inner: usize,
        number: u32,
        port: u16,
        aggregate: bool,
        source: Self::Address,
        destination: Self::Address,
    ) -> u16;
}

impl Outer for V4 {
    const OUTER: u32 = 20;
    const ETHERTYPE: u16 = ETHERTYPE_IPV4;

    #[inline(always)]
    fn step(ip: usize, ttl: u8) {
        store8::<8>(ip, ttl - 1);
        store16::<10>(ip, checksum::update(load16::<10>(ip), TTL_STEP));
    }

    #[inline(always)]
    fn is_outer(ip: usize) -> bool {
        load8::<0>(ip) == VERSION_AND_LENGTH && load16::<6>(ip) & FRAGMENT == 0
    }

    #[inline(always)]
    fn protocol(ip: usize) -> u8 {
        load8::<9>(ip)
    }

    #[inline(always)]
    fn length(ip: usize) -> u16 {
        u16::from_be(load16::<2>(ip))
    }

    #[inline(always)]
    fn has_ports(ip: usize) -> bool {
        Self::is_outer(ip) && matches!(load8::<9>(ip), INNER_TCP | INNER_UDP | INNER_SCTP)
    }

    #[inline(always)]
    fn is_inner(ip: usize) -> bool {
        load8::<0>(ip) >> 4 == 4
            && matches!(load8::<9>(ip), INNER_TCP | INNER_UDP | INNER_SCTP | PROTOCOL_ICMP)
    }

    #[inline(always)]
    fn ttl(ip: usize) -> u8 {
        load8::<8>(ip)
    }

    #[inline(always)]
    fn is_error(ip: usize, icmp: usize, end: usize) -> bool {
        Self::is_outer(ip)
            && load8::<9>(ip) == PROTOCOL_ICMP
            && icmp < end
            && matches!(load8::<0>(icmp), 3 | 11 | 12)
    }

    #[inline(always)]
    fn headers(ip: usize, end: usize) -> u32 {
        Self::OUTER + transport(load8::<9>(ip), ip + Self::OUTER as usize, end)
    }

    #[inline(always)]
    fn is_marked(ip: usize) -> bool {
        load8::<1>(ip) & CE4 == CE4
    }

    #[inline(always)]
    fn mark<P: Packet>(_: P, ip: usize) {
        let tos = load8::<1>(ip);
        if tos & CE4 == 0 || tos & CE4 == CE4 {
            return;
        }
        let before = load16::<0>(ip);
        store8::<1>(ip, tos | CE4);
        let delta = checksum::delta(before as u64, load16::<0>(ip) as u64);
        store16::<10>(ip, checksum::update(load16::<10>(ip), delta));
    }

    #[inline(always)]
    fn number(ip: usize) -> u32 {
        number_of(u16::from_be(load16::<4>(ip)))
    }

    /// The number is in the identification, which has no other meaning in a packet that is never
    /// fragmented (RFC 6864 section 4.1).
    #[inline(always)]
    fn header(
        ip: usize,
        inner: usize,
        number: u32,
        port: u16,
        aggregate: bool,
        source: Address4,
        destination: Address4,
    ) -> u16 {
        let first = u16::from_ne_bytes([VERSION_AND_LENGTH, load8::<1>(inner)]);
        let time_and_protocol = u16::from_ne_bytes([TTL, either(PROTOCOL_IPIP, port)]);
        let packet = Self::length(inner);
        let added = if aggregate && packet == 0 { 0 } else { (Self::OUTER + udp(port)) as u16 };
        let length = packet.wrapping_add(added).to_be();
        let (from, to) = (source.wire() as u64, destination.wire() as u64);
        let number = identification(number).to_be();
        let words =
            first as u64 + length as u64 + number as u64 + DONT_FRAGMENT as u64 + time_and_protocol as u64;
        let sum = words + (from >> 16) + (from & 0xffff) + (to >> 16) + (to & 0xffff);
        store16::<0>(ip, first);
        store16::<2>(ip, length);
        store16::<4>(ip, number);
        store16::<6>(ip, DONT_FRAGMENT);
        store16::<8>(ip, time_and_protocol);
        store16::<10>(ip, !fold(sum));
        store32::<12>(ip, source.wire());
        store32::<16>(ip, destination.wire());
        packet
    }
}

impl Outer for V6 {
    const OUTER: u32 = 40;
    const ETHERTYPE: u16 = ETHERTYPE_IPV6;

    #[inline(always)]
    fn step(ip: usize, ttl: u8) {
        store8::<7>(ip, ttl - 1);
    }

    #[inline(always)]
    fn is_outer(ip: usize) -> bool {
        load8::<0>(ip) >> 4 == 6
    }

    #[inline(always)]
    fn protocol(ip: usize) -> u8 {
        load8::<6>(ip)
    }

    #[inline(always)]
    fn length(ip: usize) -> u16 {
        u16::from_be(load16::<4>(ip)).wrapping_add(Self::OUTER as u16)
    }

    #[inline(always)]
    fn has_ports(ip: usize) -> bool {
        matches!(load8::<6>(ip), INNER_TCP | INNER_UDP | INNER_SCTP)
    }

    #[inline(always)]
    fn is_inner(ip: usize) -> bool {
        // Extension headers that `ipv6_ext` walks, a fragment's among them, may precede the
        // protocol: the program for them looks at it.
        let next = load8::<6>(ip);
        load8::<0>(ip) >> 4 == 6
            && matches!(next, INNER_TCP | INNER_UDP | INNER_SCTP | PROTOCOL_ICMP6 | 0 | 43 | 44 | 51 | 60)
    }

    #[inline(always)]
    fn ttl(ip: usize) -> u8 {
        load8::<7>(ip)
    }

    #[inline(always)]
    fn is_error(ip: usize, icmp: usize, end: usize) -> bool {
        load8::<6>(ip) == PROTOCOL_ICMP6 && icmp < end && matches!(load8::<0>(icmp), 1..=4)
    }

    #[inline(always)]
    fn headers(ip: usize, end: usize) -> u32 {
        Self::OUTER + transport(load8::<6>(ip), ip + Self::OUTER as usize, end)
    }

    #[inline(always)]
    fn is_marked(ip: usize) -> bool {
        load8::<1>(ip) & CE6 == CE6
    }

    #[inline(always)]
    fn mark<P: Packet>(packet: P, ip: usize) {
        let class = load8::<1>(ip);
        if class & CE6 == 0 || class & CE6 == CE6 {
            return;
        }
        let before = load16::<0>(ip);
        store8::<1>(ip, class | CE6);
        // No checksum of the header makes up for the change, as one of IPv4 does.
        if let Some(skb) = packet.skb() {
            skb.update_sum(checksum::delta(before as u64, load16::<0>(ip) as u64));
        }
    }

    #[inline(always)]
    fn number(ip: usize) -> u32 {
        (load8::<3>(ip) & NUMBER6) as u32
    }

    /// The flow label is copied, too: routers and cards spread packets by it (RFC 6438). Its last
    /// three bits are the number.
    #[inline(always)]
    fn header(
        ip: usize,
        inner: usize,
        number: u32,
        port: u16,
        _: bool,
        source: Address6,
        destination: Address6,
    ) -> u16 {
        let (source, destination) = (source.wire(), destination.wire());
        let label = load32::<0>(inner) & u32::from_ne_bytes([0xff, 0xff, 0xff, !NUMBER6]);
        store32::<0>(ip, label | u32::from_ne_bytes([0, 0, 0, number as u8]));
        let packet = Self::length(inner);
        store16::<4>(ip, packet.wrapping_add(udp(port) as u16).to_be());
        store16::<6>(ip, u16::from_ne_bytes([either(PROTOCOL_IPV6, port), TTL]));
        store64::<8>(ip, source[0]);
        store64::<16>(ip, source[1]);
        store64::<24>(ip, destination[0]);
        store64::<32>(ip, destination[1]);
        packet
    }
}
