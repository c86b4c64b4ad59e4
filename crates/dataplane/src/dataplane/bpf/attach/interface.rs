//! A network device as programs are attached to it and as the maps describe it.

use std::net::IpAddr;

/// A device to attach to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Interface {
    pub name: String,
    pub ifindex: u32,
    pub mac: [u8; 6],
    /// The largest IP packet, in bytes.
    pub mtu: u32,
    /// Whether the device is up and has a carrier.
    pub running: bool,
    /// Whether the device stands for a real wire: packets on it carry finished checksums.
    pub wire: bool,
    /// Whether its packets begin with an Ethernet header; otherwise they begin with an IP header.
    pub ethernet: bool,
    /// Whether the device has exactly one peer, so that packets reach it without a route.
    pub point_to_point: bool,
    /// The device's global addresses, in the kernel's order.
    pub addresses: Vec<IpAddr>,
}
