//! The minimum work for a packet of a flow, and for the first packet of one.

use core::mem::{MaybeUninit, size_of};

use aya_ebpf::{
    bindings::{bpf_fib_lookup as FibParameters, xdp_md},
    btf_maps::{Array, HashMap},
    cty::c_void,
    helpers::{bpf_fib_lookup, bpf_map_lookup_elem, bpf_map_update_elem},
    macros::{btf_map, xdp},
    programs::XdpContext,
};
use traffic_policy_bench_ebpf::FloorFlow;
use traffic_policy_ebpf::{
    abi::{Address4, Frontend, FrontendKey, Port, Ports, Slot, Tuple, scope},
    checksum::{self, TTL_STEP},
    hash,
    words::{load8, load16, load32, store8, store16, store32, store64},
};

use super::feed::FEED;

#[btf_map]
pub static FLOOR_FLOWS: HashMap<Tuple<Address4>, FloorFlow, 262_144> = HashMap::new();
#[btf_map]
pub static FLOOR_FRONTENDS: HashMap<FrontendKey<Address4>, Frontend, 65_536, 1> = HashMap::new();
#[btf_map]
pub static FLOOR_SLOTS: Array<Slot<Address4>, 262_144> = Array::new();
/// The address and MAC addresses that new flows get, as a flow.
#[btf_map]
pub static FLOOR_NODE: Array<FloorFlow, 1> = Array::new();

const XDP_ABORTED: u32 = 0;
const XDP_PASS: u32 = 2;
const XDP_TX: u32 = 3;

const ETHERNET: usize = 14;
const NOEXIST: u64 = 1;

/// Offset of the destination address in `struct bpf_fib_lookup`; the constants below are offsets as
/// well. The destination MAC follows the source MAC.
const FIB_DESTINATION: usize = 32;
const FIB_SOURCE_MAC: usize = 52;
const AF_INET: u8 = 2;

/// Parses IPv4 without options, and TCP.
#[inline(always)]
fn parse(md: *mut xdp_md) -> Option<(usize, Tuple<Address4>)> {
    let (data, end) = unsafe { ((*md).data as usize, (*md).data_end as usize) };
    if data + ETHERNET + 40 > end {
        return None;
    }
    let ip = data + ETHERNET;
    if load16::<12>(data) != 0x0800u16.to_be() || load8::<0>(ip) != 0x45 || load8::<9>(ip) != 6 {
        return None;
    }
    let tuple = Tuple {
        source: Address4::from_wire(load32::<12>(ip)),
        destination: Address4::from_wire(load32::<16>(ip)),
        ports: Ports::from_wire(load32::<20>(ip)),
        protocol: 6,
    };
    Some((ip, tuple))
}

#[inline(always)]
fn translate(ip: usize, flow: *const FloorFlow) {
    unsafe {
        let data = ip - ETHERNET;
        store64::<0>(data, (*flow).macs);
        store32::<8>(data, (*flow).source_mac_tail);
        store32::<12>(ip, (*flow).source.wire());
        store32::<16>(ip, (*flow).destination.wire());
        store32::<20>(ip, (*flow).ports.wire());
        store8::<8>(ip, load8::<8>(ip) - 1);
        let (addresses, ports) = ((*flow).address_delta, (*flow).port_delta);
        store16::<10>(ip, checksum::update(load16::<10>(ip), checksum::add(addresses, TTL_STEP)));
        store16::<36>(ip, checksum::update(load16::<36>(ip), checksum::add(addresses, ports)));
    }
}

#[inline(always)]
fn lookup<M, K, V>(map: *const M, key: &K) -> Option<*mut V> {
    let key = core::ptr::from_ref(key).cast::<c_void>();
    let value = unsafe { bpf_map_lookup_elem(map.cast_mut().cast(), key) }.cast::<V>();
    if value.is_null() { None } else { Some(value) }
}

#[xdp(frags)]
pub fn floor_established(ctx: XdpContext) -> u32 {
    let Some((ip, tuple)) = parse(ctx.ctx) else { return XDP_PASS };
    let Some(flow) = lookup::<_, _, FloorFlow>(&raw const FLOOR_FLOWS, &tuple) else { return XDP_PASS };
    translate(ip, flow);
    XDP_TX
}

#[xdp(frags)]
pub fn mac_swap(ctx: XdpContext) -> u32 {
    let md = ctx.ctx;
    let (data, end) = unsafe { ((*md).data as usize, (*md).data_end as usize) };
    if data + ETHERNET > end {
        return XDP_ABORTED;
    }
    let (to, to_tail) = (load32::<0>(data), load16::<4>(data));
    let (from, from_tail) = (load32::<6>(data), load16::<10>(data));
    store32::<0>(data, from);
    store16::<4>(data, from_tail);
    store32::<6>(data, to);
    store16::<10>(data, to_tail);
    XDP_TX
}

#[xdp(frags)]
pub fn floor_new(ctx: XdpContext) -> u32 {
    first_packet::<false>(ctx.ctx)
}

#[xdp(frags)]
pub fn floor_new_fib(ctx: XdpContext) -> u32 {
    first_packet::<true>(ctx.ctx)
}

#[inline(always)]
fn first_packet<const FIB: bool>(md: *mut xdp_md) -> u32 {
    let Some((ip, tuple)) = parse(md) else { return XDP_PASS };
    new::<FIB>(md, ip, &tuple).map_or(XDP_PASS, |()| XDP_TX)
}

/// Returns the MAC addresses towards a destination, as a flow stores them.
#[inline(always)]
pub fn macs(md: *mut xdp_md, source: Address4, destination: Address4) -> Option<(u64, u32)> {
    let mut words = MaybeUninit::<[u64; 8]>::uninit();
    unsafe {
        words.write([0; 8]);
        let fib = words.as_mut_ptr().cast::<FibParameters>();
        let base = fib.cast::<u8>();
        (*fib).family = AF_INET;
        (*fib).ifindex = (*md).ingress_ifindex;
        base.add(FIB_DESTINATION).cast::<Address4>().write(destination);
        base.add(FIB_DESTINATION - 16).cast::<Address4>().write(source);
        if bpf_fib_lookup(md.cast(), fib, size_of::<FibParameters>() as i32, 0) != 0 {
            return None;
        }
        let word = |offset: usize| base.add(FIB_SOURCE_MAC + offset).cast::<u32>().read() as u64;
        // s0..s3, s4 s5 d0 d1, d2..d5
        let (first, middle, last) = (word(0), word(4), word(8));
        let destination = middle >> 16 | last << 16;
        let source = first | (middle & 0xffff) << 32;
        Some((destination | source << 48, (source >> 16) as u32))
    }
}

#[inline(always)]
fn new<const FIB: bool>(md: *mut xdp_md, ip: usize, tuple: &Tuple<Address4>) -> Option<()> {
    let key = FrontendKey {
        address: tuple.destination,
        port: tuple.ports.destination(),
        protocol: tuple.protocol as u16,
        scope: scope::ADDRESS,
    };
    let frontend = lookup::<_, _, Frontend>(&raw const FLOOR_FRONTENDS, &key)?;
    let range = unsafe { (*frontend).cluster };
    let index = range.base + hash::pick(hash::tuple(tuple, 1), range.len);
    let slot = unsafe { *FLOOR_SLOTS.get_ptr(index)? };
    let node = FLOOR_NODE.get_ptr(0)?;
    // The port is distinct for each packet of a run; a free one is not searched for.
    let port = Port::from_host(0x8000 | unsafe { (*FEED.get_ptr(0)?).next } as u16);
    let new = Ports::new(port, slot.port);
    let word = |address: Address4| address.wire() as u64;
    let (before, after) =
        unsafe { (word(tuple.source) + word(tuple.destination), word((*node).source) + word(slot.address)) };
    let (macs, source_mac_tail) = if FIB {
        macs(md, unsafe { (*node).source }, slot.address)?
    } else {
        unsafe { ((*node).macs, (*node).source_mac_tail) }
    };
    let mut request = MaybeUninit::<FloorFlow>::uninit();
    let mut reply = MaybeUninit::<FloorFlow>::uninit();
    unsafe {
        request.write(FloorFlow {
            source: (*node).source,
            destination: slot.address,
            ports: new,
            address_delta: checksum::delta(before, after),
            port_delta: checksum::delta(checksum::port_sum(tuple.ports), checksum::port_sum(new)),
            macs,
            source_mac_tail,
            zero: [0; 9],
        });
        reply.write(FloorFlow {
            source: tuple.destination,
            destination: tuple.source,
            ports: tuple.ports.reversed(),
            address_delta: checksum::delta(after, before),
            port_delta: checksum::delta(checksum::port_sum(new), checksum::port_sum(tuple.ports)),
            macs,
            source_mac_tail,
            zero: [0; 9],
        });
    }
    let reply_key = Tuple {
        source: slot.address,
        destination: unsafe { (*node).source },
        ports: new.reversed(),
        protocol: tuple.protocol,
    };
    insert(&reply_key, reply.as_ptr())?;
    insert(tuple, request.as_ptr())?;
    translate(ip, request.as_ptr());
    Some(())
}

#[inline(always)]
fn insert(key: &Tuple<Address4>, flow: *const FloorFlow) -> Option<()> {
    let map = (&raw const FLOOR_FLOWS).cast_mut().cast::<c_void>();
    let key = core::ptr::from_ref(key).cast::<c_void>();
    let result = unsafe { bpf_map_update_elem(map, key.cast_mut(), flow.cast_mut().cast(), NOEXIST) };
    (result == 0).then_some(())
}
