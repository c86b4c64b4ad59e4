//! IPv4 and IPv6 for the floors of direct forwarding.

use aya_ebpf::cty::c_void;
use traffic_policy_bench_ebpf::{FloorFlow, FloorFlow6};
use traffic_policy_ebpf::{
    abi::{Address, Address4, Address6, FlowKey, Multipliers, Ports, Slot, Tuple},
    checksum::{self, fold},
    words::{load8, load16, load32, load64, store16, store32, store64},
};

use super::{FLOOR_FLOWS6, FLOOR_FRONTENDS6, FLOOR_NODE6, FLOOR_SLOTS6, TCP, UDP};
use crate::floor::{FLOOR_FLOWS, FLOOR_FRONTENDS, FLOOR_NODE, FLOOR_SLOTS};

/// TTL or hop limit of outer packets.
const TTL: u8 = 64;
const DONT_FRAGMENT: u16 = 0x4000u16.to_be();

/// One address family.
pub trait Family {
    type Address: Address;
    type Key;
    type Flow;
    /// Bytes of an IP header.
    const IP: usize;
    const ETHERTYPE: u16;
    /// Protocol of an outer header: IPv4 within IPv4, IPv6 within IPv6.
    const OUTER: u8;
    /// BPF_F_ADJ_ROOM_ENCAP_L3_IPV4 or that of IPv6.
    const ENCAPSULATED: u64;

    /// Reads the tuple of a packet without options or extension headers.
    fn tuple(ip: usize) -> Option<Tuple<Self::Address>>;
    fn protocol(ip: usize) -> u8;
    fn key(tuple: &Tuple<Self::Address>) -> Self::Key;
    fn flows() -> *mut c_void;
    fn frontends() -> *mut c_void;
    fn slot(index: u32) -> Option<*const Slot<Self::Address>>;
    fn node() -> Option<*const Self::Flow>;
    fn macs(flow: *const Self::Flow) -> (u64, u32);
    fn ports(flow: *const Self::Flow) -> Ports;
    fn deltas(flow: *const Self::Flow) -> (u16, u16);
    /// Returns an entry of the node towards an endpoint.
    fn towards(node: *const Self::Flow, endpoint: Self::Address) -> Self::Flow;
    /// Returns an entry whose packets get a tuple, with what that adds to their checksums.
    fn entry(to: &Tuple<Self::Address>, deltas: (u16, u16)) -> Self::Flow;
    /// Writes the outer header in front of the packet at `inner`, with `UDP` that of UDP behind it.
    fn header<const UDP: bool>(ip: usize, inner: usize, flow: *const Self::Flow);
    /// Replaces the addresses, and in IPv4 their part of the header's checksum.
    fn replace(ip: usize, flow: *const Self::Flow);
}

pub struct V4;
pub struct V6;

/// The bytes of a UDP header, or 0 without one.
#[inline(always)]
const fn udp<const UDP: bool>() -> u16 {
    if UDP { 8 } else { 0 }
}

/// The protocol that an outer header names.
#[inline(always)]
const fn protocol<F: Family, const UDP: bool>() -> u8 {
    if UDP { self::UDP as u8 } else { F::OUTER }
}

/// Writes the UDP header in front of a packet of `length` bytes, without a checksum.
#[inline(always)]
fn udp_header(l4: usize, ports: Ports, length: u16) {
    store32::<0>(l4, ports.wire());
    store16::<4>(l4, length.wrapping_add(8).to_be());
    store16::<6>(l4, 0);
}

impl Family for V4 {
    type Address = Address4;
    type Key = Tuple<Address4>;
    type Flow = FloorFlow;
    const IP: usize = 20;
    const ETHERTYPE: u16 = 0x0800u16.to_be();
    const OUTER: u8 = 4;
    const ENCAPSULATED: u64 = 2;

    #[inline(always)]
    fn tuple(ip: usize) -> Option<Tuple<Address4>> {
        let protocol = load8::<9>(ip) as u32;
        if load8::<0>(ip) != 0x45 || protocol != TCP && protocol != UDP {
            return None;
        }
        Some(Tuple {
            source: Address4::from_wire(load32::<12>(ip)),
            destination: Address4::from_wire(load32::<16>(ip)),
            ports: Ports::from_wire(load32::<20>(ip)),
            protocol,
        })
    }
    #[inline(always)]
    fn protocol(ip: usize) -> u8 {
        load8::<9>(ip)
    }
    #[inline(always)]
    fn key(tuple: &Tuple<Address4>) -> Tuple<Address4> {
        *tuple
    }
    #[inline(always)]
    fn flows() -> *mut c_void {
        (&raw const FLOOR_FLOWS).cast_mut().cast()
    }
    #[inline(always)]
    fn frontends() -> *mut c_void {
        (&raw const FLOOR_FRONTENDS).cast_mut().cast()
    }
    #[inline(always)]
    fn slot(index: u32) -> Option<*const Slot<Address4>> {
        FLOOR_SLOTS.get_ptr(index)
    }
    #[inline(always)]
    fn node() -> Option<*const FloorFlow> {
        FLOOR_NODE.get_ptr(0)
    }
    #[inline(always)]
    fn macs(flow: *const FloorFlow) -> (u64, u32) {
        unsafe { ((*flow).macs, (*flow).source_mac_tail) }
    }
    #[inline(always)]
    fn ports(flow: *const FloorFlow) -> Ports {
        unsafe { (*flow).ports }
    }
    #[inline(always)]
    fn deltas(flow: *const FloorFlow) -> (u16, u16) {
        unsafe { ((*flow).address_delta, (*flow).port_delta) }
    }
    #[inline(always)]
    fn towards(node: *const FloorFlow, endpoint: Address4) -> FloorFlow {
        unsafe { FloorFlow { destination: endpoint, ..*node } }
    }
    #[inline(always)]
    fn entry(to: &Tuple<Address4>, (address_delta, port_delta): (u16, u16)) -> FloorFlow {
        FloorFlow {
            source: to.source,
            destination: to.destination,
            ports: to.ports,
            address_delta,
            port_delta,
            macs: 0,
            source_mac_tail: 0,
            zero: [0; 9],
        }
    }
    #[inline(always)]
    fn header<const UDP: bool>(ip: usize, inner: usize, flow: *const FloorFlow) {
        let (source, destination) = unsafe { ((*flow).source, (*flow).destination) };
        let first = u16::from_ne_bytes([0x45, load8::<1>(inner)]);
        let packet = u16::from_be(load16::<2>(inner));
        let length = packet.wrapping_add(20 + udp::<UDP>()).to_be();
        let time_and_protocol = u16::from_ne_bytes([TTL, protocol::<Self, UDP>()]);
        let (from, to) = (source.wire() as u64, destination.wire() as u64);
        let words = first as u64 + length as u64 + DONT_FRAGMENT as u64 + time_and_protocol as u64;
        let sum = words + (from >> 16) + (from & 0xffff) + (to >> 16) + (to & 0xffff);
        store16::<0>(ip, first);
        store16::<2>(ip, length);
        store16::<4>(ip, 0);
        store16::<6>(ip, DONT_FRAGMENT);
        store16::<8>(ip, time_and_protocol);
        store16::<10>(ip, !fold(sum));
        store32::<12>(ip, source.wire());
        store32::<16>(ip, destination.wire());
        if UDP {
            udp_header(ip + Self::IP, unsafe { (*flow).ports }, packet);
        }
    }
    #[inline(always)]
    fn replace(ip: usize, flow: *const FloorFlow) {
        unsafe {
            store32::<12>(ip, (*flow).source.wire());
            store32::<16>(ip, (*flow).destination.wire());
            store16::<10>(ip, checksum::update(load16::<10>(ip), (*flow).address_delta));
        }
    }
}

impl Family for V6 {
    type Address = Address6;
    type Key = FlowKey<Address6>;
    type Flow = FloorFlow6;
    const IP: usize = 40;
    const ETHERTYPE: u16 = 0x86ddu16.to_be();
    const OUTER: u8 = 41;
    const ENCAPSULATED: u64 = 4;

    #[inline(always)]
    fn tuple(ip: usize) -> Option<Tuple<Address6>> {
        let protocol = load8::<6>(ip) as u32;
        if load8::<0>(ip) >> 4 != 6 || protocol != TCP && protocol != UDP {
            return None;
        }
        Some(Tuple {
            source: Address6::from_wire([load64::<8>(ip), load64::<16>(ip)]),
            destination: Address6::from_wire([load64::<24>(ip), load64::<32>(ip)]),
            ports: Ports::from_wire(load32::<40>(ip)),
            protocol,
        })
    }
    #[inline(always)]
    fn protocol(ip: usize) -> u8 {
        load8::<6>(ip)
    }
    /// The kernel hashes every byte of a key: the floor folds addresses as the packet path does.
    #[inline(always)]
    fn key(tuple: &Tuple<Address6>) -> FlowKey<Address6> {
        FlowKey::folded(tuple, Multipliers::UNSEEDED)
    }
    #[inline(always)]
    fn flows() -> *mut c_void {
        (&raw const FLOOR_FLOWS6).cast_mut().cast()
    }
    #[inline(always)]
    fn frontends() -> *mut c_void {
        (&raw const FLOOR_FRONTENDS6).cast_mut().cast()
    }
    #[inline(always)]
    fn slot(index: u32) -> Option<*const Slot<Address6>> {
        FLOOR_SLOTS6.get_ptr(index)
    }
    #[inline(always)]
    fn node() -> Option<*const FloorFlow6> {
        FLOOR_NODE6.get_ptr(0)
    }
    #[inline(always)]
    fn macs(flow: *const FloorFlow6) -> (u64, u32) {
        unsafe { ((*flow).macs, (*flow).source_mac_tail) }
    }
    #[inline(always)]
    fn ports(flow: *const FloorFlow6) -> Ports {
        unsafe { (*flow).ports }
    }
    #[inline(always)]
    fn deltas(flow: *const FloorFlow6) -> (u16, u16) {
        unsafe { ((*flow).address_delta, (*flow).port_delta) }
    }
    #[inline(always)]
    fn towards(node: *const FloorFlow6, endpoint: Address6) -> FloorFlow6 {
        unsafe { FloorFlow6 { destination: endpoint, ..*node } }
    }
    #[inline(always)]
    fn entry(to: &Tuple<Address6>, (address_delta, port_delta): (u16, u16)) -> FloorFlow6 {
        FloorFlow6 {
            source: to.source,
            destination: to.destination,
            ports: to.ports,
            address_delta,
            port_delta,
            macs: 0,
            source_mac_tail: 0,
            zero: [0; 13],
        }
    }
    #[inline(always)]
    fn header<const UDP: bool>(ip: usize, inner: usize, flow: *const FloorFlow6) {
        let (source, destination) = unsafe { ((*flow).source.wire(), (*flow).destination.wire()) };
        let packet = u16::from_be(load16::<4>(inner)).wrapping_add(40);
        store32::<0>(ip, load32::<0>(inner));
        store16::<4>(ip, packet.wrapping_add(udp::<UDP>()).to_be());
        store16::<6>(ip, u16::from_ne_bytes([protocol::<Self, UDP>(), TTL]));
        store64::<8>(ip, source[0]);
        store64::<16>(ip, source[1]);
        store64::<24>(ip, destination[0]);
        store64::<32>(ip, destination[1]);
        if UDP {
            udp_header(ip + Self::IP, unsafe { (*flow).ports }, packet);
        }
    }
    #[inline(always)]
    fn replace(ip: usize, flow: *const FloorFlow6) {
        let (source, destination) = unsafe { ((*flow).source.wire(), (*flow).destination.wire()) };
        store64::<8>(ip, source[0]);
        store64::<16>(ip, source[1]);
        store64::<24>(ip, destination[0]);
        store64::<32>(ip, destination[1]);
    }
}
