//! Devices, addresses and routes of this node, as data.

use std::{collections::BTreeSet, net::IpAddr};

use super::headers::Header;

/// A network device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Link {
    pub index: u32,
    pub name: String,
    /// Of a device without Ethernet: the first bytes of what the kernel takes for its address, or zeros.
    pub mac: [u8; 6],
    pub mtu: u32,
    /// Switched on.
    pub up: bool,
    /// Has a carrier, too.
    pub running: bool,
    pub loopback: bool,
    pub header: Header,
    /// It stands for a real wire: no kind (veth, vxlan, bridge …), so a driver of hardware.
    pub wire: bool,
    /// VLAN devices are on it.
    pub has_vlans: bool,
    /// It has one other end: packets find it without a route.
    pub point_to_point: bool,
}

/// An address of this node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Address {
    pub link: u32,
    pub address: IpAddr,
    /// Neither link-local nor loopback.
    pub global: bool,
}

/// A unicast route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Route {
    pub link: u32,
    pub default: bool,
    pub gateway: bool,
}

/// All addresses of this node.
pub fn local(addresses: &[Address]) -> BTreeSet<IpAddr> {
    addresses.iter().map(|address| address.address).collect()
}
