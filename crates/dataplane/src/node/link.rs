//! Devices, addresses and routes of this node, as data.

use std::{collections::BTreeSet, net::IpAddr};

use super::headers::Header;

/// A network device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Link {
    pub index: u32,
    pub name: String,
    /// The MAC address; for a device without Ethernet, the first bytes of what the kernel considers
    /// its address, or zeros.
    pub mac: [u8; 6],
    pub mtu: u32,
    /// Whether it is up.
    pub up: bool,
    /// Whether it is up and has a carrier.
    pub running: bool,
    pub loopback: bool,
    pub header: Header,
    /// Whether it stands for a real wire: it has no kind (veth, vxlan, bridge …), and therefore a
    /// hardware driver.
    pub wire: bool,
    /// Whether there are VLAN devices on it.
    pub has_vlans: bool,
    /// Whether it has exactly one peer, so that packets reach it without a route.
    pub point_to_point: bool,
}

/// An address of this node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Address {
    pub link: u32,
    pub address: IpAddr,
    /// Whether it is neither link-local nor loopback.
    pub global: bool,
}

/// A unicast route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Route {
    pub link: u32,
    pub default: bool,
    pub gateway: bool,
}

/// Returns all addresses of this node.
pub fn local(addresses: &[Address]) -> BTreeSet<IpAddr> {
    addresses.iter().map(|address| address.address).collect()
}
