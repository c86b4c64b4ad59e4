//! An ICMP error about an outer packet that this node has sent: a router between the nodes finds it
//! too long, or does not reach its destination. The sender of what is inside is told about its own
//! packet, if enough of that is quoted: RFC 2003 section 4, RFC 2473 section 8.
//!
//! A request: the frontend tells the client.
//!
//! ```text
//! router → node     ICMP  quoted: node → endpoint, (UDP,) client → frontend
//! frontend → client ICMP  quoted: client → frontend
//! ```
//!
//! A reply through the node in front: the router tells the frontend, as if it were on the way to
//! the client, and the program for ICMP errors, which sees that next, translates it for the
//! endpoint as every other one ([`crate::datapath::icmp_errors`]).
//!
//! ```text
//! router → node     ICMP  quoted: node → node in front, (UDP,) frontend → client
//! router → frontend ICMP  quoted: frontend → client
//! router → endpoint ICMP  quoted: endpoint → client
//! ```
//!
//! The error is made shorter by the length of the outer headers that it quotes, and its own headers
//! are written anew, over what was quoted of those.

use traffic_policy_ebpf::{
    abi::{
        Address, Address4, Address6, BY_MAC, Flow, GUE_PORT, PROTOCOL_SCTP, PROTOCOL_TCP, PROTOCOL_UDP,
        Ports, Tuple, is_outer_port, jump, kind,
    },
    checksum::{self, word_sum},
    outcome::Outcome,
    tcp::TUNNELLED,
};

use core::ptr;

use crate::datapath::{
    barrier::opaque,
    clock,
    ctx::Packet,
    family::{V4, V6},
    flow::table::FlowTable,
    forward::{
        self, Forwarding, Translatable,
        nexthop::{self, Route},
        outer::{self, Outer},
        through_front,
    },
    maps::NEXTHOPS,
    parse::{
        ETHERNET, Parse as _,
        fixed::{self, PROTOCOL_ICMP, PROTOCOL_ICMP6, PROTOCOL_IPIP, PROTOCOL_IPV6},
    },
    value::borrow,
    verdict::Decision,
    words::{load16, load32, load64, store16, store32, store64},
};

const ICMP: usize = 8;
/// The bytes of the transport header that are quoted at least: RFC 792.
const QUOTED: usize = 8;
const TTL: u8 = 64;

/// Type and code, as one word: RFC 792, RFC 4443.
const TOO_LONG4: u16 = 0x0304;
const HOST_UNREACHABLE4: u16 = 0x0301;
/// The endpoint itself says so, while its node does not open packets for it yet, or a node in front
/// that opens none any more. The sender is to send its segment again; an error would end its
/// attempt. IPv6 has a parameter problem.
const PROTOCOL_UNREACHABLE4: u16 = 0x0302;
/// The same about a packet within UDP.
const PORT_UNREACHABLE4: u16 = 0x0303;
const PORT_UNREACHABLE6: u16 = 0x0104;
const TOO_LONG6: u16 = 0x0200;
const ADDRESS_UNREACHABLE6: u16 = 0x0103;

/// Such an error.
pub struct OuterError {
    /// The IP header.
    ip: usize,
    /// The length in bytes of the IP packet.
    length: u32,
    /// The bytes of the outer headers that are quoted.
    outer: u32,
    /// Type and code of the error that the sender gets, host order.
    kind: u16,
    /// The last word of its ICMP header, host order.
    rest: u32,
}

/// A family in which such errors can be read and written.
pub trait TellSender: Outer {
    /// Whether the IP header of an ICMP error, at `ip`, has the usual length, and the packet quoted
    /// at `quoted` is an outer one, within UDP if `port` is not 0, with a whole packet of TCP, UDP
    /// or SCTP in it, at `inner`.
    fn is_about_outer(ip: usize, quoted: usize, inner: usize, port: u16) -> bool;
    /// Returns type, code and last word of the error that the sender gets for the one at `icmp`,
    /// about a packet with `outer` bytes of outer headers; `None` if it gets none.
    fn told(icmp: usize, outer: u32) -> Option<(u16, u32)>;
    /// The sum of the words of the IP header at `ip`.
    fn header_sum(ip: usize) -> u64;
    /// The sum of the words that the checksum of an ICMP packet of `length` bytes covers beyond the
    /// packet.
    fn pseudo_sum(source: Self::Address, destination: Self::Address, length: u32) -> u64;
    /// Writes the IP header of an ICMP packet of `length` bytes.
    fn icmp_header(ip: usize, source: Self::Address, destination: Self::Address, length: u32);
}

/// Returns the source port, memory order, of the datagram that an ICMP error of this reversed tuple
/// is about, if that may be an outer packet; otherwise 0.
#[inline(always)]
pub fn port_of<A: Address>(tuple: &Tuple<A>) -> u16 {
    let (from, to) = (tuple.ports.destination(), tuple.ports.source());
    if tuple.protocol == PROTOCOL_UDP && to == GUE_PORT && is_outer_port(from) { from.wire() } else { 0 }
}

/// Tells the sender of a packet what a router says about the outer one around it; `None` if this is
/// no such error, or cannot be told. `port`: the source port of the UDP that it travelled in,
/// memory order; 0: it travelled in IP. What is read has been made readable by [`ParseIcmpError`].
///
/// [`ParseIcmpError`]: crate::datapath::parse::icmp_error::ParseIcmpError
#[inline(always)]
pub fn tell<P: Packet, F: TellSender>(packet: P, port: u16) -> Option<Decision> {
    if !P::TC || P::L2 == 0 {
        return None;
    }
    let header = F::OUTER as usize;
    let outer = opaque((F::OUTER + outer::udp(port)) as u64) as u32;
    let ip = packet.data() + ETHERNET;
    let (icmp, quoted) = (ip + header, ip + header + ICMP);
    let inner = opaque((quoted + outer as usize) as u64) as usize;
    let l4 = inner + header;
    if quoted + header > packet.end()
        || l4 + QUOTED > packet.end()
        || !F::is_about_outer(ip, quoted, inner, port)
    {
        return None;
    }
    let length = F::length(ip) as u32;
    if length < (2 * header + ICMP + QUOTED) as u32 + outer || fixed::in_one_buffer(packet, length).is_err() {
        return None;
    }
    let (kind, rest) = F::told(icmp, outer)?;
    let scratch = F::scratch()?;
    let (source, destination) = F::addresses_at(inner);
    set!(scratch.opening.source = source);
    set!(scratch.opening.destination = destination);
    set!(scratch.opening.ports = Ports::from_wire(load32::<0>(l4)));
    set!(scratch.opening.protocol = F::protocol(inner) as u32);
    let (from, to) = F::addresses_at(quoted);
    if F::addresses_at(ip).1 != from {
        return None;
    }
    set!(scratch.outer.source = from);
    set!(scratch.outer.destination = to);
    set!(scratch.outer.port = port);
    let error = OuterError { ip, length, outer, kind, rest };
    match if F::V6 { sender6() } else { sender4() } {
        CLIENT => tell_client::<P, F>(packet, &error),
        ENDPOINT => tell_endpoint::<P, F>(packet, &error),
        _ => None,
    }
}

/// The results of [`sender`].
const CLIENT: i32 = 1;
const ENDPOINT: i32 = 2;
const NOBODY: i32 = 0;

global_functions! {
    sender4 => sender::<V4>;
    sender6 => sender::<V6>;
}

/// Returns who has sent the packet `Scratch::opening`, if this node sends packets of its flow
/// within outer packets like `Scratch::outer`.
#[inline(always)]
fn sender<F: Outer>() -> i32 {
    let Some(scratch) = F::scratch() else { return NOBODY };
    let (flows, room) = (FlowTable::<F>::new(), place!(mut scratch.flow_key));
    let (from, to) = (get!(scratch.outer.source), get!(scratch.outer.destination));
    let port = get!(scratch.outer.port);
    let entry = flows.find_in(borrow(place!(const scratch.opening)), room);
    if !entry.is_null() && get!(entry.kind) == kind::DIRECT {
        let is_sent = get!(entry.port_delta) & !BY_MAC == port
            && get!(entry.source) == from
            && get!(entry.destination) == to;
        return if is_sent { CLIENT } else { NOBODY };
    }
    set!(scratch.other.source = get!(scratch.opening.destination));
    set!(scratch.other.destination = get!(scratch.opening.source));
    set!(scratch.other.ports = get!(scratch.opening.ports).reversed());
    set!(scratch.other.protocol = get!(scratch.opening.protocol));
    let entry = flows.find_in(borrow(place!(const scratch.other)), room);
    if entry.is_null() || get!(entry.kind) != kind::DELIVER || get!(entry.state) & TUNNELLED == 0 {
        return NOBODY;
    }
    let reply = (get!(scratch.opening.destination), get!(scratch.opening.ports));
    let is_sent = through_front::leads_to::<F>(get!(entry.head).way_back(), reply, to, port)
        && F::node_addresses().lookup::<_, u32>(&from).is_some();
    if is_sent { ENDPOINT } else { NOBODY }
}

/// Tells the client, the source of `Scratch::opening`, as the frontend.
#[inline(always)]
fn tell_client<P: Packet, F: TellSender>(packet: P, error: &OuterError) -> Option<Decision> {
    let scratch = F::scratch()?;
    let (client, frontend) = (get!(scratch.opening.source), get!(scratch.opening.destination));
    let now = clock::jiffies();
    let Route::Via(via) = nexthop::resolve::<P, F>(packet, packet.ingress(), 0, frontend, client, now) else {
        return None;
    };
    let entry = place!(mut scratch.request);
    set!(entry.kind = kind::REPLY);
    set!(entry.source = frontend);
    set!(entry.destination = client);
    let hop = if via.hop == 0 { ptr::null() } else { NEXTHOPS.get_ptr(via.hop as u32)? };
    let unresolved = if via.hop == 0 { via.ifindex } else { 0 };
    Some(forward::forward::<P, F, _>(packet, error, &Forwarding { entry, hop, unresolved }, now))
}

/// Tells the frontend, the source of `Scratch::opening`, as the router that has sent the error;
/// then this program sees it once more.
#[inline(always)]
fn tell_endpoint<P: Packet, F: TellSender>(packet: P, error: &OuterError) -> Option<Decision> {
    let scratch = F::scratch()?;
    let entry = place!(mut scratch.request);
    set!(entry.source = F::addresses_at(error.ip).0);
    set!(entry.destination = get!(scratch.opening.source));
    if Translatable::<P, F>::translate(error, packet, entry, false) {
        packet.jump::<F, { jump::ICMP_ERROR }>();
    }
    Some(Outcome::DroppedInternalError.into())
}

impl<P: Packet, F: TellSender> Translatable<P, F> for OuterError {
    #[inline(always)]
    fn outcome(_: u8) -> Outcome {
        Outcome::RepliedIcmpError
    }
    #[inline(always)]
    fn ip(&self) -> usize {
        self.ip
    }
    /// The error begins anew here.
    #[inline(always)]
    fn ttl(&self) -> u8 {
        TTL
    }
    #[inline(always)]
    fn wire_length(&self, _: P) -> u32 {
        self.length - self.outer
    }
    #[inline(always)]
    fn ttl_exceeded(&self) -> Outcome {
        Outcome::DroppedTtlExceeded
    }
    #[inline(always)]
    fn mtu_exceeded(&self, _: u32) -> Decision {
        Outcome::DroppedMtuExceeded.into()
    }
    #[inline(always)]
    fn account(&self, _: *mut Flow<F::Address>, _: u32) {}

    /// The checksum is updated, not computed: one that was wrong stays wrong.
    #[inline(always)]
    fn translate(&self, packet: P, entry: *const Flow<F::Address>, _: bool) -> bool {
        let Some(skb) = packet.skb() else { return false };
        let header = F::OUTER as usize;
        let (source, destination) = (get!(entry.source), get!(entry.destination));
        let (kind, rest) = (self.kind.to_be(), self.rest.to_be());
        let icmp = self.ip + header;
        let (from, to) = F::addresses_at(self.ip);
        // The inner header, if there is none of UDP.
        let udp = load64_sum(load64::<0>(icmp + ICMP + header));
        let was = load16::<0>(icmp) as u64
            + word_sum(load32::<4>(icmp))
            + F::header_sum(icmp + ICMP)
            + if self.outer == F::OUTER { 0 } else { udp }
            + F::pseudo_sum(from, to, self.length - F::OUTER);
        let length = self.length - self.outer;
        let is = kind as u64 + word_sum(rest) + F::pseudo_sum(source, destination, length - F::OUTER);
        let sum = checksum::update(load16::<2>(icmp), checksum::delta(was, is));
        if !skb.remove_room(self.outer) {
            return false;
        }
        let ip = packet.data() + ETHERNET;
        let icmp = ip + header;
        if icmp + ICMP > packet.end() {
            return false;
        }
        F::icmp_header(ip, source, destination, length - F::OUTER);
        store16::<0>(icmp, kind);
        store16::<2>(icmp, sum);
        store32::<4>(icmp, rest);
        true
    }
}

impl TellSender for V4 {
    #[inline(always)]
    fn is_about_outer(ip: usize, quoted: usize, inner: usize, port: u16) -> bool {
        Self::is_outer(ip)
            && Self::is_outer(quoted)
            && Self::protocol(quoted) == outer::either(PROTOCOL_IPIP, port)
            && Self::is_outer(inner)
            && matches!(Self::protocol(inner) as u32, PROTOCOL_TCP | PROTOCOL_UDP | PROTOCOL_SCTP)
    }

    /// A router that does not name the MTU (before RFC 1191) tells nothing that would help.
    #[inline(always)]
    fn told(icmp: usize, outer: u32) -> Option<(u16, u32)> {
        let mtu = u16::from_be(load16::<6>(icmp)) as u32;
        match u16::from_be(load16::<0>(icmp)) {
            TOO_LONG4 if mtu > outer => Some((TOO_LONG4, mtu - outer)),
            TOO_LONG4 | PROTOCOL_UNREACHABLE4 | PORT_UNREACHABLE4 => None,
            0x0300..=0x03ff | 0x0b00..=0x0bff => Some((HOST_UNREACHABLE4, 0)),
            _ => None,
        }
    }

    #[inline(always)]
    fn header_sum(ip: usize) -> u64 {
        load64_sum(load64::<0>(ip)) + load64_sum(load64::<8>(ip)) + word_sum(load32::<16>(ip))
    }

    #[inline(always)]
    fn pseudo_sum(_: Address4, _: Address4, _: u32) -> u64 {
        0
    }

    #[inline(always)]
    fn icmp_header(ip: usize, source: Address4, destination: Address4, length: u32) {
        let length = (length + Self::OUTER) as u16;
        // Version 4, five words; DF; TTL and protocol, each pair as one word.
        let (first, fragment) = (0x4500u16.to_be(), 0x4000u16.to_be());
        let ttl = u16::from_ne_bytes([TTL, PROTOCOL_ICMP]);
        let sum = first as u64 + length.to_be() as u64 + fragment as u64 + ttl as u64;
        store16::<0>(ip, first);
        store16::<2>(ip, length.to_be());
        store16::<4>(ip, 0);
        store16::<6>(ip, fragment);
        store16::<8>(ip, ttl);
        store16::<10>(ip, !checksum::fold(sum + source.sum() + destination.sum()));
        store32::<12>(ip, source.wire());
        store32::<16>(ip, destination.wire());
    }
}

impl TellSender for V6 {
    #[inline(always)]
    fn is_about_outer(_: usize, quoted: usize, inner: usize, port: u16) -> bool {
        Self::protocol(quoted) == outer::either(PROTOCOL_IPV6, port)
            && Self::is_outer(inner)
            && matches!(Self::protocol(inner) as u32, PROTOCOL_TCP | PROTOCOL_UDP | PROTOCOL_SCTP)
    }

    #[inline(always)]
    fn told(icmp: usize, outer: u32) -> Option<(u16, u32)> {
        let mtu = u32::from_be(load32::<4>(icmp));
        match u16::from_be(load16::<0>(icmp)) {
            0x0200..=0x02ff if mtu > outer => Some((TOO_LONG6, mtu - outer)),
            PORT_UNREACHABLE6 => None,
            0x0100..=0x01ff | 0x0300..=0x03ff => Some((ADDRESS_UNREACHABLE6, 0)),
            _ => None,
        }
    }

    #[inline(always)]
    fn header_sum(ip: usize) -> u64 {
        let (source, destination) = Self::addresses_at(ip);
        load64_sum(load64::<0>(ip)) + source.sum() + destination.sum()
    }

    #[inline(always)]
    fn pseudo_sum(source: Address6, destination: Address6, length: u32) -> u64 {
        source.sum() + destination.sum() + (length as u16).to_be() as u64
    }

    #[inline(always)]
    fn icmp_header(ip: usize, source: Address6, destination: Address6, length: u32) {
        let (source, destination) = (source.wire(), destination.wire());
        store32::<0>(ip, u32::from_ne_bytes([0x60, 0, 0, 0]));
        store16::<4>(ip, (length as u16).to_be());
        store16::<6>(ip, u16::from_ne_bytes([PROTOCOL_ICMP6, TTL]));
        store64::<8>(ip, source[0]);
        store64::<16>(ip, source[1]);
        store64::<24>(ip, destination[0]);
        store64::<32>(ip, destination[1]);
    }
}

/// The sum of the 16-bit words of eight bytes.
#[inline(always)]
fn load64_sum(words: u64) -> u64 {
    word_sum(words as u32) + word_sum((words >> 32) as u32)
}
