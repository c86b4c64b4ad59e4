//! Next hops, and the devices that lead to them.

use super::WideAddress;

/// A frame may be sent to this hop from XDP.
pub const HOP_XDP: u32 = 1;
/// Its device has no Ethernet header: no MAC address is needed.
pub const HOP_NO_ETHERNET: u32 = 2;
/// The device leads to several others by the kernel's routes (IPIP or SIT without `remote`):
/// packets need the route itself. Never without [`HOP_NO_ETHERNET`].
pub const HOP_ROUTED: u32 = 4;
/// Of a device alone: an XDP program sees its packets before TC does.
pub const DEVICE_XDP: u32 = 8;

/// A next hop. A hop keeps its device, gateway and MTU for life. Its destination MAC lies within
/// one aligned word, so a reader on another CPU never sees half of one. What orders writer and
/// readers: docs/memory-ordering.md.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Hop {
    /// Destination MAC, then the first two bytes of the source MAC.
    pub macs: u64,
    /// The other four bytes of the source MAC.
    pub source_mac_tail: u32,
    pub ifindex: u32,
    /// Largest IP packet that fits, in bytes.
    pub mtu: u32,
    /// The hop epoch under which it was resolved.
    pub epoch: u32,
    /// Time of resolution: low half of jiffies.
    pub resolved: u32,
    /// [`HOP_XDP`], [`HOP_NO_ETHERNET`], [`HOP_ROUTED`].
    pub flags: u32,
}

/// Key of a next hop: its device, the address that is resolved to a MAC, and the MTU.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct HopKey {
    pub gateway: WideAddress,
    pub ifindex: u32,
    /// 2 (AF_INET) or 10 (AF_INET6).
    pub family: u8,
    /// 0 or 1, see [`RuntimeConfig::route`][super::RuntimeConfig::route].
    pub generation: u8,
    /// Largest IP packet, bytes: a matter of the destination (its route, or what path MTU discovery
    /// found), not of the gateway alone.
    pub mtu: u16,
}

/// Number of hops; half of them are in use at a time (see
/// [`RuntimeConfig::route`][super::RuntimeConfig::route]).
pub const HOPS: u32 = 16_384;
/// Hops of one generation.
pub const HOPS_PER_GENERATION: u32 = HOPS / 2;

/// An attached device.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct DeviceInfo {
    pub mac: [u8; 6],
    pub zero: u16,
    /// [`HOP_XDP`] if it takes frames from XDP; [`HOP_NO_ETHERNET`], [`HOP_ROUTED`],
    /// [`DEVICE_XDP`].
    pub flags: u32,
    /// Largest IP packet, bytes; 0 = not known.
    pub mtu: u32,
    /// Its first global IPv4 address ([`Address4`][super::Address4]), then its first global IPv6
    /// address. Used where the kernel's FIB does not name the source.
    pub addresses: [u64; 3],
}
