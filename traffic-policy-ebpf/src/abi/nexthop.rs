//! Next hops, and the devices that lead to them.

use super::WideAddress;

/// A frame may be sent to this hop from XDP.
pub const HOP_XDP: u32 = 1;
/// The hop's device has no Ethernet header: no MAC address is needed.
pub const HOP_NO_ETHERNET: u32 = 2;
/// The device leads to several neighbours by the kernel's routes (IPIP or SIT without `remote`):
/// packets need the route itself. It is never set without [`HOP_NO_ETHERNET`].
pub const HOP_ROUTED: u32 = 4;
/// A flag of devices only: an XDP program sees the device's packets before TC does.
pub const DEVICE_XDP: u32 = 8;
/// The hop is a pod of this node, by the host side of its device: packets go straight to the device
/// at its other end.
pub const HOP_POD: u32 = 16;
/// The hop is another node, by its MAC address, which takes packets for its endpoints as they are.
pub const HOP_L2: u32 = 32;
/// A bit of [`HopKey::family`]: the key of a hop with the flag [`HOP_POD`].
pub const POD_KEY: u8 = 0x80;

/// A next hop. It keeps its device, gateway and MTU for life. Its destination MAC lies within one
/// aligned word, so a reader on another CPU never sees half of one. The order of writer and
/// readers: docs/memory-ordering.md.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Hop {
    /// The destination MAC, then the first two bytes of the source MAC.
    pub macs: u64,
    /// The other four bytes of the source MAC.
    pub source_mac_tail: u32,
    pub ifindex: u32,
    /// The largest IP packet that fits, in bytes.
    pub mtu: u32,
    /// The hop epoch under which the hop was resolved.
    pub epoch: u32,
    /// The time of resolution: low half of jiffies.
    pub resolved: u32,
    /// The flags [`HOP_XDP`], [`HOP_NO_ETHERNET`], [`HOP_ROUTED`], [`HOP_POD`], [`HOP_L2`].
    pub flags: u32,
}

/// The key of a next hop: its device, the address that is resolved to a MAC, and the MTU.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct HopKey {
    pub gateway: WideAddress,
    pub ifindex: u32,
    /// The address family: 2 (AF_INET) or 10 (AF_INET6); with [`POD_KEY`] for a pod.
    pub family: u8,
    /// The generation, 0 or 1: see [`RouteConfig::route`][super::RouteConfig::route].
    pub generation: u8,
    /// The largest IP packet, in bytes. It depends on the destination (its route, or the result of
    /// path MTU discovery), not on the gateway alone.
    pub mtu: u16,
}

/// The number of hops; half of them are in use at a time (see
/// [`RouteConfig::route`][super::RouteConfig::route]).
pub const HOPS: u32 = 16_384;
/// The number of hops of one generation.
pub const HOPS_PER_GENERATION: u32 = HOPS / 2;

/// An attached device.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct DeviceInfo {
    pub mac: [u8; 6],
    pub zero: u16,
    /// The flags: [`HOP_XDP`] if the device takes frames from XDP; [`HOP_NO_ETHERNET`],
    /// [`HOP_ROUTED`], [`DEVICE_XDP`].
    pub flags: u32,
    /// The largest IP packet, in bytes; 0 = not known.
    pub mtu: u32,
    /// The device's first global IPv4 address ([`Address4`][super::Address4]), then its first
    /// global IPv6 address. They are used where the kernel's FIB does not name the source.
    pub addresses: [u64; 3],
}
