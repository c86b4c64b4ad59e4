//! The least that must be done for a packet of a flow, and for the first packet of one.

use core::mem::MaybeUninit;

use aya_ebpf::{
    bindings::xdp_md,
    btf_maps::{Array, HashMap},
    cty::c_void,
    helpers::{bpf_map_lookup_elem, bpf_map_update_elem},
    macros::{btf_map, xdp},
    programs::XdpContext,
};
use traffic_policy_ebpf::{
    abi::{Address4, Frontend, FrontendKey, Slot, Tuple, destination_port, ports, scope},
    bench::FloorFlow,
    checksum::{self, TTL_STEP},
    hash,
};

use super::{
    feed::FEED,
    wire::{load8, load16, load32, store8, store16, store32, store64},
};

#[btf_map]
pub static FLOOR_FLOWS: HashMap<Tuple<Address4>, FloorFlow, 262_144> = HashMap::new();
#[btf_map]
pub static FLOOR_FRONTENDS: HashMap<FrontendKey<Address4>, Frontend, 65_536, 1> = HashMap::new();
#[btf_map]
pub static FLOOR_SLOTS: Array<Slot<Address4>, 262_144> = Array::new();
/// The address and MAC addresses that new flows get, as a flow.
#[btf_map]
pub static FLOOR_NODE: Array<FloorFlow, 1> = Array::new();

const XDP_PASS: u32 = 2;
const XDP_TX: u32 = 3;

const ETHERNET: usize = 14;
const NOEXIST: u64 = 1;

/// IPv4 without options, TCP.
#[inline(always)]
fn parse(md: *mut xdp_md) -> Option<(usize, Tuple<Address4>)> {
    let (data, end) = unsafe { ((*md).data as usize, (*md).data_end as usize) };
    if data + ETHERNET + 40 > end {
        return None;
    }
    let ip = data + ETHERNET;
    unsafe {
        if load16::<12>(data) != 0x0800u16.to_be() || load8::<0>(ip) != 0x45 || load8::<9>(ip) != 6 {
            return None;
        }
        let tuple = Tuple {
            source: load32::<12>(ip),
            destination: load32::<16>(ip),
            ports: load32::<20>(ip),
            protocol: 6,
        };
        Some((ip, tuple))
    }
}

#[inline(always)]
fn translate(ip: usize, flow: *const FloorFlow) {
    unsafe {
        let data = ip - ETHERNET;
        store64::<0>(data, (*flow).macs);
        store32::<8>(data, (*flow).source_mac_tail);
        store32::<12>(ip, (*flow).source);
        store32::<16>(ip, (*flow).destination);
        store32::<20>(ip, (*flow).ports);
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

#[xdp]
pub fn floor_established(ctx: XdpContext) -> u32 {
    let Some((ip, tuple)) = parse(ctx.ctx as *mut xdp_md) else { return XDP_PASS };
    let Some(flow) = lookup::<_, _, FloorFlow>(&raw const FLOOR_FLOWS, &tuple) else { return XDP_PASS };
    translate(ip, flow);
    XDP_TX
}

#[xdp]
pub fn floor_new(ctx: XdpContext) -> u32 {
    let Some((ip, tuple)) = parse(ctx.ctx as *mut xdp_md) else { return XDP_PASS };
    new(ip, &tuple).map_or(XDP_PASS, |()| XDP_TX)
}

#[inline(always)]
fn new(ip: usize, tuple: &Tuple<Address4>) -> Option<()> {
    let key = FrontendKey {
        address: tuple.destination,
        port: destination_port(tuple.ports),
        protocol: tuple.protocol as u16,
        scope: scope::ADDRESS,
    };
    let frontend = lookup::<_, _, Frontend>(&raw const FLOOR_FRONTENDS, &key)?;
    let range = unsafe { (*frontend).cluster };
    let index = range.base + hash::pick(hash::tuple(tuple, 1), range.len);
    let slot = unsafe { *FLOOR_SLOTS.get_ptr(index)? };
    let node = FLOOR_NODE.get_ptr(0)?;
    // Distinct for each packet of a run; no search for a free one.
    let port = unsafe { (*FEED.get_ptr(0)?).next } as u16;
    let new = ports(port, slot.port);
    let (before, after) = unsafe {
        ((tuple.source as u64) + (tuple.destination as u64), ((*node).source as u64) + (slot.address as u64))
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
            macs: (*node).macs,
            source_mac_tail: (*node).source_mac_tail,
            zero: [0; 9],
        });
        reply.write(FloorFlow {
            source: tuple.destination,
            destination: tuple.source,
            ports: tuple.ports.rotate_left(16),
            address_delta: checksum::delta(after, before),
            port_delta: checksum::delta(checksum::port_sum(new), checksum::port_sum(tuple.ports)),
            macs: (*node).macs,
            source_mac_tail: (*node).source_mac_tail,
            zero: [0; 9],
        });
    }
    let reply_key = Tuple {
        source: slot.address,
        destination: unsafe { (*node).source },
        ports: new.rotate_left(16),
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
