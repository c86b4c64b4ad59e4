//! The device by which a reply of an endpoint on this node leaves, if that is not the one by which
//! its request came.

use core::ptr;

use traffic_policy_ebpf::abi::{DeviceInfo, DeviceOrPlace, Flow, Hop};

use crate::datapath::{
    clock,
    ctx::Skb,
    family::Family,
    flow::{table, way_back},
    forward::{
        Current,
        nexthop::{self, Route},
    },
    maps::{DEVICES, NEXTHOPS, Table},
};

/// `LOOPBACK_IFINDEX`: as the ingress device, it means that the node itself created the packet.
const LOOPBACK: u32 = 1;

/// Finds the route of a reply that is about to leave by another device than the one by which its
/// request came. The kernel routed it by the endpoint's address, whereas its receiver and the
/// networks in between see the new source, so the FIB is queried once more with that source. The
/// answer is kept in the entry: hop 0 means that the packet leaves by the right device, and is also
/// used in every doubtful case.
#[inline(always)]
pub fn find<P: Skb, F: Family>(packet: P, entry: *mut Flow<F::Address>) -> ReplyWay {
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
    // A mark may have routed it here on purpose.
    let (mark, came_by) = (packet.mark(), packet.came_by());
    if mark != 0 && nexthop::FIB_MARK.load() == 0 {
        return ReplyWay::AS_ROUTED;
    }
    let ingress = if came_by == 0 { LOOPBACK } else { came_by };
    let (source, destination) = (get!(entry.source), get!(entry.destination));
    if let Route::Via(via) = nexthop::resolve::<P, F>(packet, ingress, mark, source, destination, now)
        && via.attached != 0
        && via.ifindex != leaves_by
    {
        let mut way = ReplyWay { hop: ptr::null(), ifindex: via.ifindex };
        if let Some(hop) = NEXTHOPS.get_ptr(via.hop as u32).filter(|_| via.hop != 0)
            && let Some(scratch) = F::scratch()
        {
            way.hop = hop;
            let _ = way_back::store_hop(entry, via.hop, via.epoch, scratch);
        }
        return way;
    }
    // The device is a member of a bond, which XDP knows by its own index: its packets leave by the
    // bond, and must not be looked up again.
    let came_by = get!(entry.device_or_place);
    if came_by != DeviceOrPlace::TUNNELLED
        && Table::of(&raw const DEVICES).lookup::<u32, DeviceInfo>(&came_by.device()).is_none()
    {
        set!(entry.device_or_place = DeviceOrPlace::of_device(leaves_by));
    }
    // The epoch from before the look-up.
    table::set_next_hop(entry, 0, current.route);
    ReplyWay::AS_ROUTED
}

/// The device and hop by which a reply of an endpoint on this node leaves.
pub struct ReplyWay {
    /// The hop; null where the neighbour is not resolved: the kernel resolves it.
    pub hop: *const Hop,
    /// A device other than the one that the kernel has chosen; 0: the kernel's choice.
    pub ifindex: u32,
}

impl ReplyWay {
    const AS_ROUTED: Self = Self { hop: ptr::null(), ifindex: 0 };
}
