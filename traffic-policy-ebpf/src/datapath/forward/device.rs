//! The MTU and the flags of the device by which a packet leaves, where no stored next hop has them.

use traffic_policy_ebpf::abi::{DeviceInfo, Scratch};

use crate::datapath::{
    family::Family,
    maps::{DEVICES, Table},
};

/// Returns the largest IP packet that fits where the FIB, queried by this very program, has named a
/// device and no neighbour; and the device's flags.
#[inline(always)]
pub fn unresolved<F: Family>(ifindex: u32, scratch: *const Scratch<F::Address>) -> (u32, u32) {
    let (mtu, flags) = find(ifindex);
    let route_mtu = get!(scratch.route_mtu) as u32;
    (if mtu == 0 { route_mtu } else { mtu.min(route_mtu) }, flags)
}

/// Returns the largest IP packet that fits an attached device (0: not known), and its flags.
#[inline(always)]
pub fn find(ifindex: u32) -> (u32, u32) {
    let device = Table::of(&raw const DEVICES).lookup::<u32, DeviceInfo>(&ifindex);
    device.map_or((0, 0), |device| (get!(device.mtu), get!(device.flags)))
}
