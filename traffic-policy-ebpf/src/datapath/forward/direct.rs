//! Direct forwarding: a packet travels unchanged, within an outer packet that is addressed to the
//! endpoint, to the endpoint's node, which opens it ([`crate::datapath::open`]); or, on the same
//! segment, without one to that node's MAC address, whose Maglev table names the same endpoint.

use aya_ebpf::bindings::{__sk_buff, xdp_md};
use traffic_policy_ebpf::{
    abi::{
        Address, BY_MAC, Flow, HOP_L2, HOP_NO_ETHERNET, HOP_XDP, REPLY_THROUGH_FRONT, Scratch, frontend,
        kind, mac_key, maglev::FORMER, way,
    },
    outcome::Outcome,
};

use crate::datapath::{
    barrier::full_fence,
    ctx::{Packet, Skb as _, tc::Tc, xdp::Xdp},
    family::{Family, V4, V6},
    forward::{self, Forwarding, Translatable, nexthop, outer},
    lb::List,
    parse,
    value::borrow,
    verdict::Decision,
    words::{load64, store16, store32, store64},
};

/// The [ways][way] that a Service's packets may take; 0 if they are not to be forwarded directly,
/// or programs of this kind cannot do that.
#[inline(always)]
pub fn wanted<P: Packet, F: Family>(list: &List) -> u64 {
    if P::POD {
        return 0;
    }
    let flags = get!((list.frontend).flags) as u64;
    let tunnel = way::moved(flags, frontend::TUNNEL as u64, way::TUNNEL);
    // Associations do not go on by the table, and a client with affinity may be elsewhere.
    let by_table = if P::SCTP {
        0
    } else {
        way::moved(flags, frontend::MAGLEV as u64, way::BY_TABLE)
            * (get!((list.frontend).affinity) == 0) as u64
    };
    let by_mac = way::moved(flags, frontend::L2 as u64, way::BY_MAC);
    let ways = way::DIRECT | way::UDP | by_mac | by_table | tunnel;
    way::moved(flags, frontend::DIRECT as u64, ways)
}

/// Returns the ways of packets to an owner of this number, as a mask: the table names a former one
/// no more, here and on its node.
#[inline(always)]
pub fn to_owner(number: u32) -> u64 {
    // Without a branch, which the verifier would walk both ways.
    let current = (number.wrapping_sub(1) >> 31) as u64;
    way::NAMED | (current * (way::BY_MAC | way::BY_TABLE))
}

/// Whether a flow is forwarded directly.
#[inline(always)]
pub fn is_direct<P: Packet, F: Family>(entry: *const Flow<F::Address>) -> bool {
    !P::POD && get!(entry.kind) == kind::DIRECT
}

/// Sends a packet within an outer packet. All checks precede the first write.
///
/// An aggregate of datagrams travels within IP, also in a flow within UDP: opened, it would still
/// be marked as one within UDP, and the pod's kernel, which cuts it into its datagrams, would look
/// for a header that is gone (`udp_rcv_segment`). Only a host on the same machine sends one, and
/// every node opens both. So does an aggregate of more than 65,535 bytes of IPv6: within UDP the
/// kernel moves the inner header alone when it takes the hop-by-hop header away
/// (`ipv6_hopopt_jumbo_remove`), and drops what it cannot divide then.
/// <https://github.com/torvalds/linux/blob/v6.12/net/ipv4/udp_offload.c> (`udp4_ufo_fragment`)
/// <https://github.com/torvalds/linux/blob/v6.12/include/net/ipv6.h>
#[inline(always)]
pub fn forward<P: Packet, F: outer::Outer, C: Translatable<P, F>>(
    packet: P,
    inner: &C,
    forwarding: &Forwarding<F::Address>,
    now: u32,
) -> Decision {
    let entry = forwarding.entry;
    if inner.ttl() <= 1 {
        return inner.ttl_exceeded().into();
    }
    let Some(scratch) = F::scratch() else { return Outcome::DroppedInternalError.into() };
    let number = take_number(scratch);
    if !P::SCTP
        && get!(entry.port_delta) & BY_MAC != 0
        && number == 0
        && let Some(decision) = by_mac(packet, scratch, inner, forwarding, now)
    {
        return decision;
    }
    // Each field as soon as it is known: the stack of the programs for IPv6 has no room for them.
    let outer = place!(mut scratch.outer);
    set!(outer.number = number | (get!(entry.address_delta) as u32 & REPLY_THROUGH_FRONT));
    let within_udp = !(inner.is_datagrams(packet) || inner.is_jumbo());
    set!(outer.port = (get!(entry.port_delta) & !BY_MAC) * within_udp as u16);
    let (hop, unresolved) = (forwarding.hop, forwarding.unresolved);
    let (mtu, flags, ifindex) = if !hop.is_null() {
        (get!(hop.mtu), get!(hop.flags), get!(hop.ifindex))
    } else if P::TC && unresolved != 0 {
        let (mtu, flags) = forward::device::unresolved::<F>(unresolved, scratch);
        (mtu, flags, unresolved)
    } else {
        return Outcome::DroppedNoRoute.into();
    };
    set!(outer.ifindex = ifindex);
    set!(outer.flags = (flags & HOP_NO_ETHERNET) as u16);
    let mtu = mtu.wrapping_sub(F::OUTER + outer::udp(get!(outer.port)));
    if inner.wire_length(packet) as i32 > mtu as i32 {
        return if P::TC { inner.mtu_exceeded(mtu) } else { Outcome::PassedToTc.into() };
    }
    if !P::TC && ifindex != packet.ingress() && flags & HOP_XDP == 0 {
        return Outcome::PassedToTc.into();
    }
    inner.account(entry, now);
    let (macs, source_mac_tail) =
        if hop.is_null() { (0, 0) } else { (get!(hop.macs), get!(hop.source_mac_tail)) };
    set!(outer.macs = macs);
    set!(outer.source_mac_tail = source_mac_tail);
    set!(outer.source = get!(entry.source));
    set!(outer.destination = get!(entry.destination));
    let context = packet.raw();
    let action = match (P::TC, F::V6) {
        (false, false) => send_xdp4(context.cast()),
        (false, true) => send_xdp6(context.cast()),
        (true, false) => send_tc4(context.cast()),
        (true, true) => send_tc6(context.cast()),
    };
    if action == REFUSED {
        return Outcome::DroppedInternalError.into();
    }
    Decision::sent(C::outcome_of_direct(), action)
}

/// Sends a packet to the MAC address of the endpoint's node as it is; `None` if it has to name its
/// endpoint: the next hop is not known to be a node that finds it, or the packet has come from a
/// node in the same way. While the tables of two nodes differ it would go to and fro between them.
#[inline(always)]
pub fn by_mac<P: Packet, F: outer::Outer, C: Translatable<P, F>>(
    packet: P,
    scratch: *mut Scratch<F::Address>,
    inner: &C,
    forwarding: &Forwarding<F::Address>,
    now: u32,
) -> Option<Decision> {
    let hop = forwarding.hop;
    if hop.is_null() || get!(hop.flags) & HOP_L2 == 0 {
        return None;
    }
    let ethernet = inner.ip() - parse::ETHERNET;
    if P::L2 != 0 && is_from_node(scratch, load64::<6>(ethernet) & mac_key([0xff; 6]), get!(hop.epoch)) {
        return None;
    }
    let (mtu, ifindex, flags) = (get!(hop.mtu), get!(hop.ifindex), get!(hop.flags));
    if inner.wire_length(packet) > mtu {
        return Some(if P::TC { inner.mtu_exceeded(mtu) } else { Outcome::PassedToTc.into() });
    }
    if !P::TC && ifindex != packet.ingress() && flags & HOP_XDP == 0 {
        return Some(Outcome::PassedToTc.into());
    }
    inner.account(forwarding.entry, now);
    forward::macs(ethernet, hop);
    F::step(inner.ip(), inner.ttl());
    Some(Decision::sent(C::outcome_of_direct(), packet.send(ifindex)))
}

/// Whether a node has sent the packet, by the source MAC address of its frame. The last address
/// that is none of theirs, mostly a router's, is known without a look-up for as long as the hop
/// epoch lasts, which the agent raises whenever it has changed the addresses of nodes. `epoch`:
/// that of the packet's next hop, which was read before.
#[inline(always)]
fn is_from_node<A: Address>(scratch: *mut Scratch<A>, mac: u64, epoch: u32) -> bool {
    if get!(scratch.router) == mac && get!(scratch.router_epoch) == epoch as u64 {
        return false;
    }
    // The answer must not be older than the epoch under which it is kept.
    full_fence(place!(mut scratch.router_epoch));
    if nexthop::node_of(scratch, mac).is_some() {
        return true;
    }
    set!(scratch.router = mac);
    set!(scratch.router_epoch = epoch as u64);
    false
}

/// Whether the packet `Scratch::opening` has a source that an endpoint or its node does not accept
/// from outside, so that it has to get this node's address: the endpoint's own, of a pod that is
/// its own client, or that of a node, which may have the endpoint, and may masquerade what its pods
/// send.
#[inline(always)]
pub fn is_refused_by_endpoint<F: Family>(scratch: *const Scratch<F::Address>, endpoint: F::Address) -> bool {
    let source = borrow(place!(const scratch.opening.source));
    *source == endpoint || outer::is_node::<F>(*source)
}

/// The result of [`send`] if the kernel refused; none of its verdicts.
pub const REFUSED: i32 = i32::MIN;

global_functions! {
    send_xdp4 => send::<Xdp, V4, false>, context: *mut xdp_md;
    send_xdp6 => send::<Xdp, V6, false>, context: *mut xdp_md;
    send_tc4 => send::<Tc, V4, false>, context: *mut __sk_buff;
    send_tc6 => send::<Tc, V6, false>, context: *mut __sk_buff;
}

/// Sends a packet within the outer packet of `Scratch::outer`, and returns the verdict. `OPENED`:
/// it may be an answer to a packet that was opened, even if no owner was asked before.
#[inline(always)]
pub fn send<P: Packet, F: outer::Outer, const OPENED: bool>(context: *mut P::Context) -> i32 {
    let Some(scratch) = F::scratch() else { return REFUSED };
    let packet = P::of(context);
    if !wrap::<P, F, OPENED>(packet, scratch) {
        return REFUSED;
    }
    let outer = place!(const scratch.outer);
    let ifindex = get!(outer.ifindex);
    if let Some(skb) = packet.skb() {
        if get!(outer.flags) as u32 & HOP_NO_ETHERNET != 0 {
            return skb.send_routed(ifindex);
        }
        if get!(outer.macs) == 0 {
            return skb.send_to(ifindex, place!(mut scratch.neighbour));
        }
    }
    packet.send(ifindex)
}

/// Puts the outer headers of `Scratch::outer` in front of a packet. False: the kernel refused.
#[inline(always)]
fn wrap<P: Packet, F: outer::Outer, const OPENED: bool>(
    packet: P,
    scratch: *const Scratch<F::Address>,
) -> bool {
    let outer = place!(const scratch.outer);
    let port = get!(outer.port);
    let room = F::OUTER + outer::udp(port);
    if !packet.make_room(room, F::V6, (port != 0) as u32)
        && !((OPENED || get!(outer.number) & FORMER != 0) && make_room_again::<P>(packet, room))
    {
        return false;
    }
    write_headers::<P, F>(packet, scratch)
}

/// Writes the outer headers of `Scratch::outer` where there is room for them. False: the packet is
/// shorter.
#[inline(always)]
pub fn write_headers<P: Packet, F: outer::Outer>(packet: P, scratch: *const Scratch<F::Address>) -> bool {
    let outer = place!(const scratch.outer);
    let port = get!(outer.port);
    let room = F::OUTER + outer::udp(port);
    let (data, end) = (packet.data(), packet.end());
    let ip = data + parse::ETHERNET;
    let inner = ip + room as usize;
    if ip + (F::OUTER + outer::UDP) as usize > end || inner + F::OUTER as usize > end {
        return false;
    }
    let macs = get!(outer.macs);
    if macs != 0 || !P::TC {
        store64::<0>(data, macs);
        store32::<8>(data, get!(outer.source_mac_tail));
        store16::<12>(data, F::ETHERTYPE);
    }
    let number = get!(outer.number);
    let (source, destination) = (get!(outer.source), get!(outer.destination));
    let length = F::header(ip, inner, number, port, P::TC, source, destination);
    if port != 0 {
        outer::udp_header(ip + F::OUTER as usize, port, length);
    }
    true
}

/// Returns the number for the outer packet that is being built, and forgets it.
#[inline(always)]
pub fn take_number<A: Address>(scratch: *mut Scratch<A>) -> u32 {
    let number = get!(scratch.owners.number);
    set!(scratch.owners.number = 0);
    number
}

/// Makes room for the outer header of a packet that was opened before: it may still be marked as
/// encapsulated, by a sender on this machine or by GRO, which the kernel does not do twice. The
/// mark and the offsets of the inner headers are those that it needs.
/// <https://github.com/torvalds/linux/blob/v6.12/net/core/filter.c> (`bpf_skb_net_grow`)
#[inline(always)]
fn make_room_again<P: Packet>(packet: P, room: u32) -> bool {
    packet.skb().is_some_and(|skb| skb.make_unmarked_room(room))
}
