//! Map layouts of the programs with which `cargo xtask bench` compares: see `main.rs`.
#![cfg_attr(target_arch = "bpf", no_std)]

pub mod traffic;

use core::mem::size_of;

use traffic_policy_ebpf::abi::{Address4, Address6, Flow, Ports};

/// Words of one frame: room for Ethernet, IPv6 and TCP.
pub const FRAME_WORDS: usize = 10;
/// Bytes of one frame.
pub const FRAME_LENGTH: usize = FRAME_WORDS * 8;
/// Capacity in frames, unless the loader requests more.
pub const FRAMES: u32 = 65_536;

/// Range of frames to send: those from `first` until `end`, in a loop.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Feed {
    pub next: u32,
    pub first: u32,
    pub end: u32,
    pub zero: u32,
}

/// An entry of a flow of the floor. It is as large as the packet path's own, so that memory costs
/// both the same.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct FloorFlow {
    pub source: Address4,
    pub destination: Address4,
    pub ports: Ports,
    pub address_delta: u16,
    pub port_delta: u16,
    pub macs: u64,
    pub source_mac_tail: u32,
    pub zero: [u32; 9],
}

/// The same for IPv6.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct FloorFlow6 {
    pub source: Address6,
    pub destination: Address6,
    pub ports: Ports,
    pub address_delta: u16,
    pub port_delta: u16,
    pub macs: u64,
    pub source_mac_tail: u32,
    pub zero: [u32; 13],
}

const _: () = assert!(size_of::<FloorFlow>() == size_of::<Flow<Address4>>());
const _: () = assert!(size_of::<FloorFlow6>() == size_of::<Flow<Address6>>());

/// A connection as Cilium's method keeps it, as large as Cilium's own.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct CiliumConnection {
    /// The time at which it ends, in jiffies.
    pub lifetime: u64,
    /// The number of its endpoint.
    pub backend: u32,
    pub zero: [u32; 11],
}

/// Type and length of the option of IPv4 by which Cilium names a Service, with the port in the
/// lower half: host byte order. The address follows.
pub const CILIUM_OPTION: u32 = 0x9a08_0000;

/// Places of Katran's ring of hashes, its default.
pub const RING: u32 = 65_537;

#[cfg(all(feature = "user", not(target_arch = "bpf")))]
mod pod {
    // SAFETY: repr(C), made of integers, valid for any bytes, and 'static.
    unsafe impl aya::Pod for super::Feed {}
    // SAFETY: repr(C), made of integers, valid for any bytes, and 'static.
    unsafe impl aya::Pod for super::FloorFlow {}
    // SAFETY: repr(C), made of integers, valid for any bytes, and 'static.
    unsafe impl aya::Pod for super::FloorFlow6 {}
    // SAFETY: repr(C), made of integers, valid for any bytes, and 'static.
    unsafe impl aya::Pod for super::CiliumConnection {}
}
