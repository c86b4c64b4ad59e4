//! The way back of an endpoint's replies, which the node in front names in its outer packets: to
//! the client, or through that node (`--forwarding tunnel`).
//!
//! The last packet that the endpoint's node has opened decides: where a connection goes on by
//! another node in front, its replies go through that one. The request entry has the way, which
//! each opened packet is compared with, and the reply entry has it for the program at egress.

use traffic_policy_ebpf::{
    abi::{Address, DeviceOrPlace, Flow, Head, Scratch, Tail, WayBack, kind},
    tcp::TUNNELLED,
};

use crate::datapath::{
    barrier::full_fence,
    family::{Family, V4, V6},
    flow::table::{self, FlowTable},
    value::{borrow, load_once},
};

/// Writes the way of the packet that creates a flow to its entries, before they exist.
#[inline(always)]
pub fn note<A: Address>(scratch: *mut Scratch<A>) {
    let way = WayBack::of_word(get!(scratch.opened.way_back) as u16);
    if way.is_to_client() || get!(scratch.reply.kind) != kind::REPLY_LOCAL {
        return;
    }
    set!(scratch.request.head = Head::of_way_back(way));
    set!(scratch.request.state = TUNNELLED);
    set!(scratch.reply.device_or_place = DeviceOrPlace::TUNNELLED);
    set!(scratch.reply.tail = Tail::of_way_back(way));
}

/// Gives both entries of a flow the way of an opened packet, `Scratch::opened`, or of one that the
/// client has sent to this node itself. `ifindex`: the device by which it came. The tuple of the
/// reply entry is `Scratch::other`.
#[inline(always)]
pub fn change<F: Family>(ifindex: u32) {
    let _ = if F::V6 { change6(ifindex) } else { change4(ifindex) };
}

global_functions! {
    change4 => change_in::<V4>, ifindex: u32;
    change6 => change_in::<V6>, ifindex: u32;
}

#[inline(always)]
fn change_in<F: Family>(ifindex: u32) -> i32 {
    let Some(scratch) = F::scratch() else { return 0 };
    let (flows, room) = (FlowTable::<F>::new(), place!(mut scratch.flow_key));
    let reply = flows.find_in(borrow(place!(const scratch.other)), room);
    if reply.is_null() || get!(reply.kind) != kind::REPLY_LOCAL {
        return 0;
    }
    set!(scratch.former.source = get!(reply.destination));
    set!(scratch.former.destination = get!(reply.source));
    set!(scratch.former.ports = get!(reply.ports).reversed());
    set!(scratch.former.protocol = get!(scratch.other.protocol));
    let request = flows.find_in(borrow(place!(const scratch.former)), room);
    if request.is_null()
        || get!(request.kind) != kind::DELIVER
        || !table::is_counterpart_in_place(request, place!(const scratch.other))
    {
        return 0;
    }
    let way = WayBack::of_word(get!(scratch.opened.way_back) as u16);
    set!(reply.tail = Tail::of_way_back(way));
    let state = get!(request.state) & !TUNNELLED;
    if way.is_to_client() {
        set!(reply.device_or_place = DeviceOrPlace::of_device(ifindex));
        set!(request.state = state);
    } else {
        set!(reply.device_or_place = DeviceOrPlace::TUNNELLED);
        set!(request.state = state | TUNNELLED);
    }
    // Neither the route to the client nor the way into the pod is one for this flow any more. The
    // new way is visible first: see `store_hop`.
    full_fence(place!(mut scratch.fib).cast::<u64>());
    table::set_next_hop(reply, 0, 0);
    table::set_next_hop(request, 0, 0);
    set!(request.head = Head::of_way_back(way));
    1
}

/// Stores the next hop of replies to the client, which was found while their way was to the client.
/// False: they go back through the node in front meanwhile, and no hop is stored.
///
/// Another CPU changes the way, then removes the hop ([`change`]); this one stores the hop, then
/// looks at the way once more. With a fence in between on both, the hop is removed by one of them.
#[inline(always)]
pub fn store_hop<A: Address>(reply: *mut Flow<A>, hop: u16, epoch: u16, scratch: *mut Scratch<A>) -> bool {
    table::set_next_hop(reply, hop, epoch);
    full_fence(place!(mut scratch.fib).cast::<u64>());
    if load_once(place!(const reply.device_or_place)) == DeviceOrPlace::TUNNELLED {
        table::set_next_hop(reply, 0, 0);
        return false;
    }
    true
}

/// Whether a flow of an endpoint on this node has another way than `way`.
#[inline(always)]
pub fn differs<A: Address>(request: *const Flow<A>, way: u32) -> bool {
    get!(request.head).way_back().word() as u32 != way
}
