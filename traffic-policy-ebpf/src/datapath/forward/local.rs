//! The way straight into a pod of this node, which bypasses the stack (`--local-delivery direct`):
//! which packets take it, and how a request's entry learns it.
//!
//! The way is learned from replies: the device by which a reply of an assured flow leaves its pod,
//! and the MAC addresses of that frame, swapped. So a connection begins in the stack, and rules
//! about connections judge it: SYN, SYN-ACK and ACK, or the datagrams of the first two seconds.
//! Where nothing is known any more, requests take the stack again, until the next reply.

use core::ptr;

use aya_ebpf::bindings::__sk_buff;
use traffic_policy_ebpf::abi::{Address, Flow, HOP_POD, Hop, POD_KEY, PodDevice, kind, pod_flags};

use crate::datapath::{
    barrier::full_fence,
    clock,
    ctx::{Packet, tc::Tc},
    family::{Family, V4, V6},
    flow::table::{self, FlowTable},
    forward::{
        Current,
        nexthop::{self, Route},
    },
    maps::{NEXTHOPS, POD_DEVICES, PREFILTER, Table},
    parse::ETHERNET,
    value::{borrow, load_once},
    words::{load32, load64},
};

/// The first request of a flow in each period of 2^12 jiffies (4 to 41 seconds) takes the stack:
/// conntrack, if it is in use, forgets a connection of which it sees nothing, a UDP stream after
/// two minutes.
const SEEN_BY_STACK: u32 = 12;
/// The first reply of a flow in each period of 2^8 jiffies (0.3 to 2.6 seconds) confirms the way,
/// which ends after [`RouteConfig::hop_max_age`][traffic_policy_ebpf::abi::RouteConfig].
const CONFIRMED: u32 = 8;

/// Returns the hop by which an established request goes straight to its pod; null if the stack
/// takes it.
#[inline(always)]
pub fn hop<A: Address>(entry: *const Flow<A>, current: &Current, index: u16, now: u32) -> *const Hop {
    if (get!(entry.last) ^ now) >> SEEN_BY_STACK != 0 {
        return ptr::null();
    }
    current.hop(current.route, index, now).unwrap_or(ptr::null())
}

/// Whether a reply has to confirm the way of its flow's requests. `last`: the time of the reply
/// before it.
#[inline(always)]
pub fn is_due(last: u32, now: u32) -> bool {
    (last ^ now) >> CONFIRMED != 0
}

/// Returns the device through which a pod's packets come in for routing, its bridge or the device
/// itself; 0 if nothing bypasses the stack there.
#[inline(always)]
pub fn routed_by(ifindex: u32) -> u32 {
    let Some(device) = Table::of(&raw const POD_DEVICES).lookup::<u32, PodDevice>(&ifindex) else { return 0 };
    let (bridge, flags) = (get!(device.bridge), get!(device.flags));
    if flags & pod_flags::DIRECT == 0 {
        return 0;
    }
    if bridge == 0 { ifindex } else { bridge }
}

/// Whether a device is the host side of a pod's.
#[inline(always)]
pub fn is_of_pod(ifindex: u32) -> bool {
    Table::of(&raw const POD_DEVICES).lookup::<u32, PodDevice>(&ifindex).is_some()
}

/// Teaches the request entry of a flow the way to its pod, by a reply that has just left it.
/// `Scratch::opening` holds the reply's tuple, and `Scratch::other` that of the request.
#[inline(always)]
pub fn learn<F: Family>(packet: Tc) {
    let context = packet.raw().cast();
    if F::V6 {
        learn6(context)
    } else {
        learn4(context)
    };
}

global_functions! {
    learn4 => learn_in::<V4>, context: *mut __sk_buff;
    learn6 => learn_in::<V6>, context: *mut __sk_buff;
}

#[inline(always)]
fn learn_in<F: Family>(context: *mut __sk_buff) -> i32 {
    if context.is_null() {
        return 0;
    }
    let packet = Tc::of(context);
    let (Some(filter), Some(scratch)) = (PREFILTER.get_ptr(0), F::scratch()) else { return 0 };
    let config = place!(const filter.routes);
    let request = FlowTable::<F>::new().find(borrow(place!(const scratch.other)));
    if request.is_null()
        || get!(request.kind) != kind::DELIVER
        || !table::is_counterpart(request, borrow(place!(const scratch.opening)))
    {
        return 0;
    }
    let ifindex = packet.ingress();
    let Some(device) = Table::of(&raw const POD_DEVICES).lookup::<u32, PodDevice>(&ifindex) else { return 0 };
    let (mtu, bridge) = (get!(device.mtu), get!(device.bridge));
    if get!(device.flags) & pod_flags::DIRECT == 0 {
        return 0;
    }
    let data = packet.data();
    if data + ETHERNET > packet.end() {
        return 0;
    }
    let (head, tail) = (load64::<0>(data).to_ne_bytes(), load32::<8>(data).to_ne_bytes());
    // Read before the FIB is queried, as in `nexthop::ask_fib`.
    let (route, hop_epoch) =
        (load_once(place!(const config.route)), load_once(place!(const config.hop_epoch)));
    let own = place!(mut scratch.fib).cast::<u64>();
    full_fence(own);
    let now = clock::jiffies();
    let endpoint = get!(scratch.opening.source);
    let ingress = if bridge == 0 { ifindex } else { bridge };
    // A pod must not draw packets to itself that are for another one.
    let Route::Via(via) = nexthop::resolve::<Tc, F>(packet, ingress, 0, F::Address::default(), endpoint, now)
    else {
        return 0;
    };
    if via.ifindex != ingress {
        return 0;
    }
    let mtu = mtu.min(get!(scratch.route_mtu) as u32);
    let key = place!(mut scratch.hop_key);
    set!(key.gateway = endpoint.wide());
    set!(key.ifindex = ifindex);
    set!(key.family = F::AF as u8 | POD_KEY);
    set!(key.generation = (route >> 16) as u8);
    set!(key.mtu = mtu as u16);
    let index = nexthop::hop_index(borrow(place!(const scratch.hop_key)));
    let Some(hop) = NEXTHOPS.get_ptr_mut(index).filter(|_| index != 0) else { return 0 };
    // The frame has its destination first.
    let macs = [head[6], head[7], tail[0], tail[1], tail[2], tail[3], head[0], head[1]];
    let found = Hop {
        macs: u64::from_ne_bytes(macs),
        source_mac_tail: u32::from_ne_bytes([head[2], head[3], head[4], head[5]]),
        ifindex,
        mtu,
        epoch: hop_epoch,
        resolved: now,
        flags: HOP_POD,
    };
    nexthop::write_hop(hop, &found, config, own);
    if table::next_hop(request) != (index as u16, route as u16) {
        table::set_next_hop(request, index as u16, route as u16);
    }
    1
}
