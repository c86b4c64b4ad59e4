//! Replies that go back through the node in front, at the endpoint's node (`--forwarding tunnel`):
//! translated as every reply, then sent within an outer packet to the node that has sent the
//! request, which opens it ([`crate::datapath::open_reply`]). The network sees no address but those
//! of nodes.
//!
//! ```text
//! outer: this node → node in front     inner: frontend → client
//! ```

use aya_ebpf::bindings::__sk_buff;
use traffic_policy_ebpf::{
    abi::{DirectNode, Flow, HOP_NO_ETHERNET, Ports, Scratch, SlotRoute, WayBack, outer_port},
    hash,
    outcome::Outcome,
};

use crate::datapath::{
    clock,
    ctx::{Packet, Skb, tc::Tc},
    family::{V4, V6},
    forward::{
        self, Current, Translatable, direct, nexthop,
        outer::{self, Outer},
        sctp,
    },
    maps::NEXTHOPS,
    value::load_once,
    verdict::Decision,
};

/// Translates a reply of an endpoint on this node, and sends it to the node in front. Its TTL was
/// decremented when it was routed. `last`: the time to note as that of the flow's last packet.
#[inline(always)]
pub fn send<P: Skb, F: Outer, C: Translatable<P, F>>(
    packet: P,
    translatable: &C,
    entry: *mut Flow<F::Address>,
    last: u32,
) -> Decision {
    let Some(scratch) = F::scratch() else { return Outcome::DroppedInternalError.into() };
    let way = get!(entry.tail).way_back();
    set!(scratch.opened.way_back = way.word() as u32);
    set!(scratch.outer.port = source_port::<F>(way, get!(entry.destination), get!(entry.ports)));
    let mtu = find::<P, F>(packet);
    if mtu < 0 {
        return Outcome::DroppedNoRoute.into();
    }
    let mtu = mtu as u32;
    if translatable.wire_length(packet) > mtu {
        if P::SCTP {
            if !sctp::was_divided(packet) {
                return sctp::divide::<P, F>(packet);
            }
            // For the answer, which the sender is to get as if it had come by that device.
            set!(scratch.outer.ifindex = sctp::leaves_by(packet));
        }
        return translatable.mtu_exceeded_to_front(mtu);
    }
    if translatable.is_jumbo() {
        // As in `direct::forward`.
        set!(scratch.outer.port = 0);
    }
    translatable.account(entry, last);
    if !translatable.translate(packet, entry, false) {
        return Outcome::DroppedInternalError.into();
    }
    // The outer packet is built behind an Ethernet header. The kernel removes that again where it
    // leaves by a device without one.
    if P::L2 == 0 && !packet.push_ethernet(F::ETHERTYPE) {
        return Outcome::DroppedInternalError.into();
    }
    let context = packet.raw();
    let action = if F::V6 { send6(context.cast()) } else { send4(context.cast()) };
    if action == direct::REFUSED {
        return Outcome::DroppedInternalError.into();
    }
    Decision::sent(Outcome::RepliedToFront, action)
}

/// Sends an answer that this node has made to an opened packet, `Scratch::key`, through the node in
/// front, and returns the verdict; `None` if answers go to the client itself.
#[inline(always)]
pub fn answer<P: Packet, F: Outer>(packet: P) -> Option<i32> {
    let scratch = F::scratch()?;
    if get!(scratch.opened.way_back) == 0 {
        return None;
    }
    let way = WayBack::of_word(get!(scratch.opened.way_back) as u16);
    let ports = get!(scratch.key.ports).reversed();
    set!(scratch.outer.port = source_port::<F>(way, get!(scratch.key.source), ports));
    if find::<P, F>(packet) < 0 {
        return Some(P::DROP);
    }
    let context = packet.raw();
    let action = if F::V6 { send6(context.cast()) } else { send4(context.cast()) };
    Some(if action == direct::REFUSED { P::DROP } else { action })
}

/// Finds the way back of `Scratch::opened`, and notes it in `Scratch::outer`. Returns the length in
/// bytes of the longest packet that fits, or a negative number: there is no route to the node in
/// front, or it is none any more.
///
/// Calls that follow each other, not one within another: the stack of the programs at egress has no
/// room for that.
#[inline(always)]
fn find<P: Packet, F: Outer>(packet: P) -> i32 {
    let ingress = sctp::leaves_by(packet);
    let known = if F::V6 { known6(ingress) } else { known4(ingress) };
    if known != UNKNOWN {
        return known;
    }
    if nexthop::ask::<P, F>(packet) != nexthop::VIA {
        return NONE;
    }
    if F::V6 { note6() } else { note4() }
}

global_functions! {
    known4 => known::<V4>, ingress: u32;
    known6 => known::<V6>, ingress: u32;
    note4 => note::<V4>;
    note6 => note::<V6>;
    send4 => direct::send::<Tc, V4, true>, context: *mut __sk_buff;
    send6 => direct::send::<Tc, V6, true>, context: *mut __sk_buff;
}

/// There is no route to the node in front.
const NONE: i32 = -1;
/// The FIB has to be queried.
const UNKNOWN: i32 = -2;

/// Returns the node of a way back.
#[inline(always)]
fn node<F: Outer>(way: WayBack) -> Option<*mut DirectNode<F::Address>> {
    let node = F::direct_nodes().lookup::<u32, DirectNode<F::Address>>(&way.number())?;
    (get!(node.address) != F::Address::default()).then_some(node)
}

/// Returns the source port, memory order, of the UDP that a reply by this way travels in; 0: it
/// travels in IP. It follows from the client and the reply's ports, so routers and cards spread
/// replies by it.
#[inline(always)]
fn source_port<F: Outer>(way: WayBack, client: F::Address, ports: Ports) -> u16 {
    outer_port(hash::endpoint(client, ports.wire())).wire() * way.udp()
}

/// Whether replies with these ports to a client travel by this way to this address, within UDP with
/// this source port, memory order, or within IP if it is 0.
#[inline(always)]
pub fn leads_to<F: Outer>(
    way: WayBack,
    (client, ports): (F::Address, Ports),
    address: F::Address,
    port: u16,
) -> bool {
    source_port::<F>(way, client, ports) == port
        && node::<F>(way).is_some_and(|node| get!(node.address) == address)
}

/// Notes the way back of `Scratch::opened` in `Scratch::outer`, if the route is known, and returns
/// what [`find`] does; otherwise [`UNKNOWN`], with the query for the FIB.
#[inline(always)]
fn known<F: Outer>(ingress: u32) -> i32 {
    let Some(scratch) = F::scratch() else { return NONE };
    let way = WayBack::of_word(get!(scratch.opened.way_back) as u16);
    let Some(node) = node::<F>(way) else { return NONE };
    let outer = place!(mut scratch.outer);
    set!(outer.destination = get!(node.address));
    let stored = SlotRoute {
        source: load_once(place!(const node.route.source)),
        word: load_once(place!(const node.route.word)),
        check: load_once(place!(const node.route.check)),
    };
    let now = clock::jiffies();
    if let Some((epoch, index)) = stored.route()
        && let Some(current) = Current::load()
        && let Some(hop) = current.hop(epoch, index, now)
    {
        set!(outer.source = stored.source);
        set!(outer.macs = get!(hop.macs));
        set!(outer.source_mac_tail = get!(hop.source_mac_tail));
        set!(outer.ifindex = get!(hop.ifindex));
        return complete::<F>(scratch, get!(hop.mtu), get!(hop.flags));
    }
    let query = place!(mut scratch.fib_query);
    set!(query.source = F::Address::default());
    set!(query.destination = get!(node.address));
    set!(query.ingress = ingress);
    set!(query.mark = 0);
    set!(query.now = now);
    UNKNOWN
}

/// Notes the route that the FIB has named, as [`known`] does.
#[inline(always)]
fn note<F: Outer>() -> i32 {
    let Some(scratch) = F::scratch() else { return NONE };
    let way = WayBack::of_word(get!(scratch.opened.way_back) as u16);
    let Some(node) = node::<F>(way) else { return NONE };
    let outer = place!(mut scratch.outer);
    let via = place!(const scratch.via);
    let (source, index, ifindex) = (get!(via.source), get!(via.hop), get!(via.ifindex));
    set!(outer.source = source);
    if index != 0
        && let Some(hop) = NEXTHOPS.get_ptr(index as u32)
    {
        set!(node.route = SlotRoute::new(source, get!(via.epoch), index));
        set!(outer.macs = get!(hop.macs));
        set!(outer.source_mac_tail = get!(hop.source_mac_tail));
        set!(outer.ifindex = get!(hop.ifindex));
        return complete::<F>(scratch, get!(hop.mtu), get!(hop.flags));
    }
    set!(outer.macs = 0);
    set!(outer.ifindex = ifindex);
    let (mtu, flags) = forward::device::unresolved::<F>(ifindex, scratch);
    complete::<F>(scratch, mtu, flags)
}

/// Completes `Scratch::outer`, whose port is noted, and returns the length of the longest packet
/// that fits.
#[inline(always)]
fn complete<F: Outer>(scratch: *mut Scratch<F::Address>, mtu: u32, flags: u32) -> i32 {
    let outer = place!(mut scratch.outer);
    set!(outer.flags = (flags & HOP_NO_ETHERNET) as u16);
    set!(outer.number = 0);
    let mtu = mtu.wrapping_sub(F::OUTER + outer::udp(get!(outer.port)));
    if mtu > 0xffff { NONE } else { mtu as i32 }
}
