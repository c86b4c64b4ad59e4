//! The program that opens replies which other nodes have sent within outer packets to this one, the
//! node in front (`--forwarding tunnel`), and sends them to the client. While there is the
//! frontend, no flow is looked up: what was inside says all, so a reply may come back through any
//! node in front.
//!
//! ```text
//! outer: node of the endpoint → this node     inner: frontend → client
//! ```
//!
//! A packet is opened only if its outer source is an address of a node, its outer destination one
//! of this node, and what is inside comes from a frontend of this node whose replies are opened, or
//! is an ICMP error about a request to one, or belongs to an open flow of a frontend that is gone;
//! every other one is left alone. What was opened is sent by the route to the client, and never
//! handed to the stack.

use core::ptr;

use traffic_policy_ebpf::{
    abi::{
        Fragment, HOP_NO_ETHERNET, HOP_ROUTED, HOP_XDP, Hop, IGNORED, PROTOCOL_SCTP, PROTOCOL_TCP,
        PROTOCOL_UDP, Ports, REASSEMBLY, REPLY_THROUGH_FRONT, Scratch, frontend, kind,
    },
    outcome::Outcome,
};

use crate::datapath::{
    clock,
    ctx::{Packet, Skb as _},
    family::{V4, V6},
    flow::table::FlowTable,
    forward::{
        self, client_hop,
        nexthop::{self, Route},
        outer::{self, FromNode, Outer},
    },
    lb::{Target, select},
    maps::{ANY, NEXTHOPS},
    parse::ETHERNET,
    reject,
    value::{borrow, load},
    verdict::{self, Decision},
    words::{load8, load16, load32, store16},
};

/// The bytes of an ICMP header.
const ICMP: usize = 8;
/// RFC 8200 section 4.5.
const FRAGMENT_HEADER: u8 = 44;

/// The program.
#[inline(always)]
pub fn run<P: Packet, F: Inside>(packet: P) -> i32 {
    verdict::finish(packet, P::HOOK, incoming::<P, F>(packet))
}

#[inline(always)]
fn incoming<P: Packet, F: Inside>(packet: P) -> Decision {
    let from_node = match FromNode::<F>::read(packet) {
        Ok(from_node) => from_node,
        Err(outcome) => return outcome.into(),
    };
    let Some(scratch) = F::scratch() else { return Outcome::DroppedInternalError.into() };
    let left_alone = from_node.left_alone();
    let FromNode { ip, end, destination, is_udp, .. } = from_node;
    if F::node_addresses().lookup::<_, u32>(&destination).is_none() {
        return left_alone.into();
    }
    // Not `FromNode::outer`: the verifier has less to walk where each offset is a number.
    let (room, inner) = if is_udp {
        (F::OUTER + outer::UDP, ip + (F::OUTER + outer::UDP) as usize)
    } else {
        (F::OUTER, ip + F::OUTER as usize)
    };
    if inner + F::OUTER as usize > end || !F::is_inner(inner) {
        return left_alone.into();
    }
    if is_udp && !outer::is_udp_header(ip + F::OUTER as usize, F::length(inner)) {
        return left_alone.into();
    }
    if !note_request::<F>(scratch, inner, end) || !is_opened::<F>(scratch) {
        return left_alone.into();
    }
    if get!(scratch.fragmented) != 0 {
        let key = borrow(place!(const scratch.fragment_key));
        F::fragments().insert(key, place!(const scratch.fragment), ANY);
    }
    let (source, destination) = F::addresses_at(inner);
    if F::ttl(inner) <= 1 {
        return Outcome::DroppedTtlExceeded.into();
    }
    let segment = packet.segment();
    let length = if segment == 0 { F::length(inner) as u32 } else { F::headers(inner, end) + segment };
    let marked = F::is_marked(ip);
    let now = clock::jiffies();
    let (hop, unresolved) = match way::<P, F>(packet, source, destination, now) {
        Ok(way) => way,
        Err(outcome) => return outcome.into(),
    };
    let (mtu, flags, ifindex) = if hop.is_null() {
        if !P::TC {
            return Outcome::PassedToTc.into();
        }
        let (mtu, flags) = forward::device::unresolved::<F>(unresolved, scratch);
        (mtu, flags, unresolved)
    } else {
        (get!(hop.mtu), get!(hop.flags), get!(hop.ifindex))
    };
    if length > mtu {
        // The node that has sent it takes this for the answer of a router on the way, and tells the
        // endpoint ([`forward::outer_error`]).
        let most = mtu + room;
        reject::to_reject_outer::<P, F>(packet, scratch, length, if most > 0xffff { 0xffff } else { most });
        return Outcome::DroppedMtuExceeded.into();
    }
    if !P::TC && ifindex != packet.ingress() && flags & HOP_XDP == 0 {
        return Outcome::PassedToTc.into();
    }
    if !packet.remove_room(room) {
        return Outcome::DroppedInternalError.into();
    }
    let ip = packet.data() + ETHERNET;
    if ip + F::OUTER as usize > packet.end() {
        return Outcome::DroppedInternalError.into();
    }
    if marked {
        F::mark(packet, ip);
    }
    F::step(ip, F::ttl(ip));
    if !hop.is_null() {
        forward::macs(ip - ETHERNET, hop);
        if !P::TC {
            store16::<12>(ip - ETHERNET, F::ETHERTYPE);
        }
    }
    let Some(packet) = packet.skb() else {
        return Decision::sent(Outcome::RepliedOpened, packet.send(ifindex));
    };
    let action = if flags & HOP_ROUTED != 0 || hop.is_null() && flags & HOP_NO_ETHERNET != 0 {
        packet.send_routed(ifindex)
    } else if hop.is_null() {
        packet.send_to(ifindex, place!(mut scratch.neighbour))
    } else {
        packet.send(ifindex)
    };
    Decision::sent(Outcome::RepliedOpened, action)
}

/// Returns the next hop from a frontend, `source`, to a client: that of the last reply to this
/// client, or the FIB's. Null if its neighbour is not resolved, with the device that leads to it.
/// `now`: low half of jiffies.
///
/// # Errors
/// There is no route.
#[inline(always)]
fn way<P: Packet, F: Outer>(
    packet: P,
    source: F::Address,
    client: F::Address,
    now: u32,
) -> Result<(*const Hop, u32), Outcome> {
    if let Some((hop, _, _)) = client_hop::find::<P, F>(packet, source, client, now) {
        return Ok((hop, 0));
    }
    let route = nexthop::resolve::<P, F>(packet, packet.ingress(), 0, source, client, now);
    let Route::Via(via) = route else { return Err(Outcome::DroppedNoRoute) };
    if via.hop != 0
        && let Some(hop) = NEXTHOPS.get_ptr(via.hop as u32)
    {
        client_hop::note::<P, F>(packet, source, client, (via.hop, via.epoch), now);
        return Ok((hop, 0));
    }
    Ok((ptr::null(), via.ifindex))
}

/// Notes the tuple of the request that the packet at `inner` answers, in `Scratch::opening`. False:
/// it is no answer.
#[inline(always)]
fn note_request<F: Inside>(scratch: *mut Scratch<F::Address>, inner: usize, end: usize) -> bool {
    let (frontend, client) = F::addresses_at(inner);
    let after = inner + F::OUTER as usize;
    set!(scratch.opening.source = client);
    set!(scratch.opening.destination = frontend);
    set!(scratch.fragmented = 0);
    if let Some(piece) = F::piece(inner, end) {
        return note_piece::<F>(scratch, &piece, inner, end);
    }
    let protocol = F::protocol(inner) as u32;
    if has_ports(protocol) {
        if !F::has_ports(inner) || after + 4 > end {
            return false;
        }
        set!(scratch.opening.protocol = protocol);
        set!(scratch.opening.ports = Ports::from_wire(load32::<0>(after)).reversed());
        return true;
    }
    let quoted = after + ICMP;
    let ports = quoted + F::OUTER as usize;
    if !F::is_error(inner, after, end) || ports + 4 > end || !F::has_ports(quoted) {
        return false;
    }
    let (source, destination) = F::addresses_at(quoted);
    if source != client {
        return false;
    }
    set!(scratch.opening.destination = destination);
    set!(scratch.opening.protocol = F::protocol(quoted) as u32);
    set!(scratch.opening.ports = Ports::from_wire(load32::<0>(ports)));
    true
}

/// Whether packets of a protocol have ports.
#[inline(always)]
fn has_ports(protocol: u32) -> bool {
    matches!(protocol, PROTOCOL_TCP | PROTOCOL_UDP | PROTOCOL_SCTP)
}

/// A fragment that is inside.
pub struct Piece {
    protocol: u32,
    /// The identification, in memory order.
    identification: u32,
    /// Whether it has no ports.
    later: bool,
}

/// A family whose fragments can be recognised.
pub trait Inside: Outer {
    /// The bytes of headers in front of the ports of a first fragment.
    const HEADERS: usize;
    /// Returns the fragment at `inner`; `None` for a whole packet.
    fn piece(inner: usize, end: usize) -> Option<Piece>;
}

impl Inside for V4 {
    const HEADERS: usize = 20;

    #[inline(always)]
    fn piece(inner: usize, _: usize) -> Option<Piece> {
        let bits = u16::from_be(load16::<6>(inner));
        if load8::<0>(inner) != 0x45 || bits & 0x3fff == 0 {
            return None;
        }
        Some(Piece {
            protocol: load8::<9>(inner) as u32,
            identification: load16::<4>(inner) as u32,
            later: bits & 0x1fff != 0,
        })
    }
}

impl Inside for V6 {
    const HEADERS: usize = 48;

    #[inline(always)]
    fn piece(inner: usize, end: usize) -> Option<Piece> {
        if load8::<6>(inner) != FRAGMENT_HEADER || inner + Self::HEADERS > end {
            return None;
        }
        Some(Piece {
            protocol: load8::<40>(inner) as u32,
            identification: load32::<44>(inner),
            later: u16::from_be(load16::<42>(inner)) & 0xfff8 != 0,
        })
    }
}

/// Notes the request as [`note_request`] does, for a fragment: of a first one the ports, which are
/// kept for the later ones.
#[inline(always)]
fn note_piece<F: Inside>(scratch: *mut Scratch<F::Address>, piece: &Piece, inner: usize, end: usize) -> bool {
    let (source, destination) = F::addresses_at(inner);
    let key = place!(mut scratch.fragment_key);
    set!(key.source = source);
    set!(key.destination = destination);
    set!(key.identification = piece.identification);
    set!(key.protocol = if F::V6 { 0 } else { piece.protocol });
    if piece.later {
        let Some(record) = F::fragments().lookup::<_, Fragment>(borrow(key.cast_const())) else {
            return false;
        };
        let Fragment { ports, protocol, seen } = load(record);
        set!(scratch.opening.ports = ports.reversed());
        set!(scratch.opening.protocol = protocol & !IGNORED);
        return clock::nanoseconds().wrapping_sub(seen) <= REASSEMBLY;
    }
    let at = inner + F::HEADERS;
    if at + 4 > end || !has_ports(piece.protocol) {
        return false;
    }
    let ports = Ports::from_wire(load32::<0>(at));
    set!(scratch.fragmented = 1);
    set!(scratch.fragment.ports = ports);
    set!(scratch.fragment.protocol = piece.protocol);
    set!(scratch.fragment.seen = clock::nanoseconds());
    set!(scratch.opening.ports = ports.reversed());
    set!(scratch.opening.protocol = piece.protocol);
    true
}

/// Whether replies to the request `Scratch::opening` are opened: its frontend says so, or, if that
/// is gone, an open flow of it.
#[inline(always)]
fn is_opened<F: Outer>(scratch: *const Scratch<F::Address>) -> bool {
    let found = select::frontend::<F>(&Target::of(borrow(place!(const scratch.opening))));
    if !found.is_null() {
        return get!(found.flags) & frontend::OPENS_REPLIES != 0;
    }
    let flow = FlowTable::<F>::new().find(borrow(place!(const scratch.opening)));
    !flow.is_null()
        && get!(flow.kind) == kind::DIRECT
        && get!(flow.address_delta) as u32 & REPLY_THROUGH_FRONT != 0
}
