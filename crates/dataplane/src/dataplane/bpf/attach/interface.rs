//! A network device: for attaching programs, and its description in the maps.

use std::net::IpAddr;

/// A device to attach to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Interface {
    pub name: String,
    pub ifindex: u32,
    pub mac: [u8; 6],
    /// Largest IP packet, bytes.
    pub mtu: u32,
    /// Switched on, with a carrier.
    pub running: bool,
    /// It stands for a real wire: packets on it carry finished checksums.
    pub wire: bool,
    /// Its packets begin with an Ethernet header; else with IP's.
    pub ethernet: bool,
    /// It has one other end: packets find it without a route.
    pub point_to_point: bool,
    /// Its global addresses, in the kernel's order.
    pub addresses: Vec<IpAddr>,
}
