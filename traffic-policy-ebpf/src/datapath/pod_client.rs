//! Packets that a pod of this node sends to Services, seen at the host side of its device
//! (`--pod-services on`): pods whose sockets the programs on the cgroup do not see.
//!
//! ```text
//! pod → ingress of its device: the destination becomes the endpoint → stack → endpoint
//! pod ← egress of its device:  the source becomes the frontend      ← stack ← endpoint
//! ```
//!
//! In between the packet is one from the pod to the endpoint, for routing, netfilter and conntrack
//! alike, wherever the endpoint is and whatever way leads there. So each flow is one that the stack
//! delivers (`DELIVER`, `REPLY_LOCAL`). A pod that is its own endpoint would not accept its own
//! address as a source: only these packets get the node's, and are sent back by the device.

use traffic_policy_ebpf::abi::PodDevice;

use crate::datapath::{
    ctx::Packet,
    maps::{POD_DEVICES, Table},
    words::{load16, load32},
};

/// Returns the device through which a packet comes in for routing: its bridge, where it came by a
/// port of one.
#[inline(always)]
pub fn routed_by<P: Packet>(packet: P) -> u32 {
    let ifindex = packet.ingress();
    if !P::POD {
        return ifindex;
    }
    let Some(device) = Table::of(&raw const POD_DEVICES).lookup::<u32, PodDevice>(&ifindex) else {
        return ifindex;
    };
    let bridge = get!(device.bridge);
    if bridge == 0 { ifindex } else { bridge }
}

/// Whether a frame is addressed to this node: on a port of a bridge, to the bridge itself.
#[inline(always)]
pub fn is_for_node<P: Packet>(packet: P) -> bool {
    if !P::POD {
        return packet.is_for_host();
    }
    let ifindex = packet.ingress();
    let Some(device) = Table::of(&raw const POD_DEVICES).lookup::<u32, PodDevice>(&ifindex) else {
        return false;
    };
    if get!(device.bridge) == 0 {
        return packet.is_for_host();
    }
    let data = packet.data();
    if data + P::L2 > packet.end() {
        return false;
    }
    let [a, b, c, d, e, f] = get!(device.bridge_mac);
    load32::<0>(data) == u32::from_ne_bytes([a, b, c, d]) && load16::<4>(data) == u16::from_ne_bytes([e, f])
}
