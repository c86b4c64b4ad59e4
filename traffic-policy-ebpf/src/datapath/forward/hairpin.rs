//! The way of a pod's packets to their endpoint (`--pod-services on`): through the stack, unless
//! the pod is its own endpoint. It would not accept its own address as a source, so these packets
//! get the node's, and are sent back to the device by which they came.

use traffic_policy_ebpf::{
    abi::{LocalNode, Slot},
    outcome::Outcome,
};

use crate::datapath::{
    ctx::Packet,
    family::Family,
    forward::nexthop::{self, Route},
    maps::LOCAL_NODE,
    pod_client,
};

/// Returns the route of a pod's packet, whose tuple is `Scratch::opening`, to an endpoint. The
/// stack finds it, except for that of a pod to itself.
#[inline(always)]
pub fn to_endpoint<P: Packet, F: Family>(packet: P, slot: &Slot<F::Address>, now: u32) -> Route<F::Address> {
    let (Some(scratch), Some(node)) = (F::scratch(), LOCAL_NODE.get_ptr(0)) else { return Route::Local };
    if get!(scratch.opening.source) != slot.address {
        return Route::Local;
    }
    let node: *const LocalNode = node;
    let own = F::narrow(get!(node.primary[F::INDEX]));
    if own == F::Address::default() {
        return Route::Failed(Outcome::DroppedNoRoute);
    }
    let ingress = pod_client::routed_by(packet);
    let route = nexthop::resolve::<P, F>(packet, ingress, 0, own, slot.address, now);
    if let Route::Via(_) = route {
        set!(scratch.via.source = own);
        return Route::Via(get!(scratch.via));
    }
    route
}
