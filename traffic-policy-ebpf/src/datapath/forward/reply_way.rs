//! The device by which a reply of an endpoint on this node leaves, where its request came by
//! another one.

use core::ptr;

use traffic_policy_ebpf::abi::{DeviceInfo, Flow, Hop};

use crate::datapath::{
    clock,
    ctx::Packet,
    family::Family,
    flow::table,
    forward::nexthop::{self, Current, Route},
    maps::{DEVICES, NEXTHOPS, Table},
};

/// `LOOPBACK_IFINDEX`: as the device that a packet came by, it says that the node itself has made
/// it.
const LOOPBACK: u32 = 1;

/// The way of a reply that is about to leave by another device than its request came by. The kernel
/// routed it by the endpoint's address, its receiver and networks on the way judge it by the new
/// source, so the FIB is asked once more with that. The answer is kept in the entry: hop 0 says
/// that the packet leaves rightly. So does every doubt.
#[inline(always)]
pub fn find<P: Packet, F: Family>(packet: P, entry: *mut Flow<F::Address>) -> ReplyWay {
    let leaves_by = packet.ingress();
    let Some(current) = Current::load() else { return ReplyWay::AS_ROUTED };
    let (index, epoch) = table::next_hop(entry);
    if index == 0 && epoch == current.route {
        return ReplyWay::AS_ROUTED;
    }
    let now = clock::jiffies();
    if let Some(hop) = current.hop(epoch, index, now) {
        let ifindex = get!(hop.ifindex);
        return if ifindex == leaves_by { ReplyWay::AS_ROUTED } else { ReplyWay { hop, ifindex } };
    }
    // A mark may have led it here on purpose.
    let (mark, came_by) = (packet.mark(), packet.came_by());
    if mark != 0 && nexthop::FIB_MARK.load() == 0 {
        return ReplyWay::AS_ROUTED;
    }
    let ingress = if came_by == 0 { LOOPBACK } else { came_by };
    let (source, destination) = (get!(entry.source), get!(entry.destination));
    if let Route::Via(via) = nexthop::resolve::<F>(packet.raw(), ingress, mark, source, destination, now)
        && via.attached
        && via.ifindex != leaves_by
    {
        let mut way = ReplyWay { hop: ptr::null(), ifindex: via.ifindex };
        if let Some(hop) = NEXTHOPS.get_ptr(via.hop as u32).filter(|_| via.hop != 0) {
            way.hop = hop;
            table::set_next_hop(entry, via.hop, via.epoch);
        }
        return way;
    }
    // A member of a bond, which XDP knows by its own number: its packets leave by the bond, and are
    // not to be asked about again.
    let came_by = get!(entry.ifindex);
    if Table::of(&raw const DEVICES).lookup::<u32, DeviceInfo>(&came_by).is_none() {
        set!(entry.ifindex = leaves_by);
    }
    // Under the epoch from before the question.
    table::set_next_hop(entry, 0, current.route);
    ReplyWay::AS_ROUTED
}

/// Device and hop by which a reply of an endpoint on this node leaves.
pub struct ReplyWay {
    /// Null where the neighbour is not resolved: the kernel does it.
    pub hop: *const Hop,
    /// Another device than the kernel has chosen; 0: that one.
    pub ifindex: u32,
}

impl ReplyWay {
    const AS_ROUTED: Self = Self { hop: ptr::null(), ifindex: 0 };
}
