//! A network device as programs are attached to it and as the packet path is told of it.

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
    /// Its global addresses, in the kernel's order.
    pub addresses: Vec<IpAddr>,
}
