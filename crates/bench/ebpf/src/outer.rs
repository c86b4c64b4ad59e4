//! The minimum work of direct forwarding: a packet sent within an outer one, opened again, and
//! answered past the node in front. Katran's method of sending is here, too. Modules below have the
//! first packets of flows that are opened (`first`), packets by MAC address (`by_mac`), replies
//! through the node in front (`through_front`), and Cilium's method (`cilium`).

mod by_mac;
mod cilium;
mod family;
mod first;
mod through_front;

use core::mem::MaybeUninit;

use aya_ebpf::{
    bindings::{__sk_buff, xdp_md},
    btf_maps::{Array, HashMap, LruHashMap},
    cty::c_void,
    helpers::{
        bpf_l4_csum_replace, bpf_map_lookup_elem, bpf_map_update_elem, bpf_redirect, bpf_skb_adjust_room,
        bpf_xdp_adjust_head,
    },
    macros::{btf_map, classifier, xdp},
    programs::{TcContext, XdpContext},
};
use traffic_policy_bench_ebpf::{FloorFlow, FloorFlow6, RING};
use traffic_policy_ebpf::{
    abi::{Address4, Address6, FlowKey, Frontend, FrontendKey, Slot, Tuple, scope},
    hash,
    words::{load16, store16, store32, store64},
};

use self::family::{Family, V4, V6};

#[btf_map]
pub static FLOOR_FLOWS6: HashMap<FlowKey<Address6>, FloorFlow6, 65_536> = HashMap::new();
#[btf_map]
pub static FLOOR_FRONTENDS6: HashMap<FrontendKey<Address6>, Frontend, 65_536, 1> = HashMap::new();
#[btf_map]
pub static FLOOR_SLOTS6: Array<Slot<Address6>, 1_024> = Array::new();
#[btf_map]
pub static FLOOR_NODE6: Array<FloorFlow6, 1> = Array::new();
/// The endpoint (Katran: real) that a connection had last, by Katran's method.
#[btf_map]
pub static KATRAN_LRU: LruHashMap<Tuple<Address4>, u64, 262_144> = LruHashMap::new();
/// Katran's ring of hashes: the real of each place.
#[btf_map]
pub static KATRAN_RING: Array<u32, { RING as usize }> = Array::new();

const XDP_ABORTED: u32 = 0;
const XDP_PASS: u32 = 2;
const XDP_TX: u32 = 3;
const TC_NEXT: i32 = -1;
const TC_SHOT: i32 = 2;

const ETHERNET: usize = 14;
const TCP: u32 = 6;
const UDP: u32 = 17;
const NOEXIST: u64 = 1;

/// BPF_ADJ_ROOM_MAC, BPF_F_ADJ_ROOM_FIXED_GSO.
const BEHIND_MAC: u32 = 1;
const FIXED_GSO: u64 = 1;
/// BPF_F_ADJ_ROOM_ENCAP_L4_UDP.
const ENCAPSULATED_UDP: u64 = 16;
const PSEUDO_HEADER: u64 = 1 << 4;
const MARK_MANGLED_0: u64 = 1 << 5;

/// Returns the tuple of the packet that begins at `data`, and whether it ends before `end` is
/// known: there are ports behind its IP header.
#[inline(always)]
fn parse<F: Family>(data: usize, end: usize) -> Option<Tuple<F::Address>> {
    if data + ETHERNET + F::IP + 8 > end || load16::<12>(data) != F::ETHERTYPE {
        return None;
    }
    F::tuple(data + ETHERNET)
}

#[inline(always)]
fn find<F: Family>(tuple: &Tuple<F::Address>) -> Option<*const F::Flow> {
    let key = F::key(tuple);
    lookup(F::flows(), &key)
}

#[inline(always)]
fn lookup<K, V>(map: *mut c_void, key: &K) -> Option<*const V> {
    let value = unsafe { bpf_map_lookup_elem(map, core::ptr::from_ref(key).cast()) }.cast::<V>();
    if value.is_null() { None } else { Some(value.cast_const()) }
}

/// Chooses an endpoint for the first packet of a flow, and inserts an entry, which remains in
/// `entry`.
#[inline(always)]
fn begin<F: Family>(tuple: &Tuple<F::Address>, entry: &mut MaybeUninit<F::Flow>) -> Option<()> {
    let slot = pick::<F>(tuple)?;
    entry.write(F::towards(F::node()?, unsafe { (*slot).address }));
    insert::<F>(tuple, entry)
}

/// Finds the Service of a packet, and one of its endpoints.
#[inline(always)]
fn pick<F: Family>(tuple: &Tuple<F::Address>) -> Option<*const Slot<F::Address>> {
    let key = FrontendKey {
        address: tuple.destination,
        port: tuple.ports.destination(),
        protocol: tuple.protocol as u16,
        scope: scope::ADDRESS,
    };
    let frontend = lookup::<_, Frontend>(F::frontends(), &key)?;
    let range = unsafe { (*frontend).cluster };
    F::slot(range.base + hash::pick(hash::tuple(tuple, 1), range.len))
}

/// Inserts the entry of packets with a tuple.
#[inline(always)]
fn insert<F: Family>(tuple: &Tuple<F::Address>, entry: &MaybeUninit<F::Flow>) -> Option<()> {
    let key = F::key(tuple);
    let (key, value) = (core::ptr::from_ref(&key).cast::<c_void>(), entry.as_ptr().cast::<c_void>());
    let result = unsafe { bpf_map_update_elem(F::flows(), key.cast_mut(), value.cast_mut(), NOEXIST) };
    (result == 0).then_some(())
}

#[inline(always)]
fn wrap_xdp<F: Family, const UDP: bool>(md: *mut xdp_md, flow: *const F::Flow) -> u32 {
    if unsafe { bpf_xdp_adjust_head(md, -(room::<F, UDP>() as i32)) } != 0 {
        return XDP_ABORTED;
    }
    let (data, end) = unsafe { ((*md).data as usize, (*md).data_end as usize) };
    if data + ETHERNET + room::<F, UDP>() + F::IP > end {
        return XDP_ABORTED;
    }
    write::<F, UDP>(data, flow);
    XDP_TX
}

/// The bytes of the outer headers behind that of Ethernet.
#[inline(always)]
const fn room<F: Family, const UDP: bool>() -> usize {
    F::IP + if UDP { 8 } else { 0 }
}

#[inline(always)]
fn wrap_tc<F: Family, const UDP: bool>(skb: *mut __sk_buff, flow: *const F::Flow) -> i32 {
    let flags = FIXED_GSO | F::ENCAPSULATED | if UDP { ENCAPSULATED_UDP } else { 0 };
    if unsafe { bpf_skb_adjust_room(skb, room::<F, UDP>() as i32, BEHIND_MAC, flags) } != 0 {
        return TC_SHOT;
    }
    let (data, end) = unsafe { ((*skb).data as usize, (*skb).data_end as usize) };
    if data + ETHERNET + room::<F, UDP>() + F::IP > end {
        return TC_SHOT;
    }
    write::<F, UDP>(data, flow);
    unsafe { bpf_redirect((*skb).ifindex, 0) as i32 }
}

/// Writes the Ethernet header and the outer ones.
#[inline(always)]
fn write<F: Family, const UDP: bool>(data: usize, flow: *const F::Flow) {
    write_macs::<F>(data, flow);
    store16::<12>(data, F::ETHERTYPE);
    F::header::<UDP>(data + ETHERNET, data + ETHERNET + room::<F, UDP>(), flow);
}

#[inline(always)]
fn write_macs<F: Family>(data: usize, flow: *const F::Flow) {
    let (macs, tail) = F::macs(flow);
    store64::<0>(data, macs);
    store32::<8>(data, tail);
}

#[inline(always)]
fn in_front_xdp<F: Family, const UDP: bool>(md: *mut xdp_md) -> u32 {
    let Some(tuple) = parse::<F>(unsafe { (*md).data } as usize, unsafe { (*md).data_end } as usize) else {
        return XDP_PASS;
    };
    let Some(flow) = find::<F>(&tuple) else { return XDP_PASS };
    wrap_xdp::<F, UDP>(md, flow)
}

#[inline(always)]
fn in_front_tc<F: Family, const UDP: bool>(skb: *mut __sk_buff) -> i32 {
    let Some(tuple) = parse::<F>(unsafe { (*skb).data } as usize, unsafe { (*skb).data_end } as usize) else {
        return TC_NEXT;
    };
    let Some(flow) = find::<F>(&tuple) else { return TC_NEXT };
    wrap_tc::<F, UDP>(skb, flow)
}

#[inline(always)]
fn new_xdp<F: Family, const UDP: bool>(md: *mut xdp_md) -> u32 {
    let Some(tuple) = parse::<F>(unsafe { (*md).data } as usize, unsafe { (*md).data_end } as usize) else {
        return XDP_PASS;
    };
    let mut entry = MaybeUninit::uninit();
    if begin::<F>(&tuple, &mut entry).is_none() {
        return XDP_PASS;
    }
    wrap_xdp::<F, UDP>(md, entry.as_ptr())
}

#[inline(always)]
fn new_tc<F: Family, const UDP: bool>(skb: *mut __sk_buff) -> i32 {
    let Some(tuple) = parse::<F>(unsafe { (*skb).data } as usize, unsafe { (*skb).data_end } as usize) else {
        return TC_NEXT;
    };
    let mut entry = MaybeUninit::uninit();
    if begin::<F>(&tuple, &mut entry).is_none() {
        return TC_NEXT;
    }
    wrap_tc::<F, UDP>(skb, entry.as_ptr())
}

/// Removes the outer headers, and translates what was inside.
#[inline(always)]
fn open<F: Family, const UDP: bool>(skb: *mut __sk_buff) -> i32 {
    if unwrap::<F, UDP>(skb) {
        translate::<F>(skb);
    }
    TC_NEXT
}

/// Removes the outer headers. False: there are none.
#[inline(always)]
fn unwrap<F: Family, const UDP: bool>(skb: *mut __sk_buff) -> bool {
    let (data, end) = unsafe { ((*skb).data as usize, (*skb).data_end as usize) };
    let protocol = if UDP { self::UDP as u8 } else { F::OUTER };
    data + ETHERNET + room::<F, UDP>() + F::IP <= end
        && load16::<12>(data) == F::ETHERTYPE
        && F::protocol(data + ETHERNET) == protocol
        && unsafe { bpf_skb_adjust_room(skb, -(room::<F, UDP>() as i32), BEHIND_MAC, FIXED_GSO) } == 0
}

/// Finds the flow of a packet, and translates it. False: it has none.
#[inline(always)]
fn translate<F: Family>(skb: *mut __sk_buff) -> bool {
    let (data, end) = unsafe { ((*skb).data as usize, (*skb).data_end as usize) };
    let Some(tuple) = parse::<F>(data, end) else { return false };
    let Some(flow) = find::<F>(&tuple) else { return false };
    translate_by::<F>(skb, tuple.protocol, flow)
}

/// Translates a packet of this protocol by its entry.
#[inline(always)]
fn translate_by<F: Family>(skb: *mut __sk_buff, protocol: u32, flow: *const F::Flow) -> bool {
    let (data, end) = unsafe { ((*skb).data as usize, (*skb).data_end as usize) };
    let ip = data + ETHERNET;
    let l4 = ip + F::IP;
    if l4 + 8 > end {
        return false;
    }
    F::replace(ip, flow);
    store32::<0>(l4, F::ports(flow).wire());
    let (addresses, ports) = F::deltas(flow);
    let (at, mangled) = if protocol == TCP { (16, 0) } else { (6, MARK_MANGLED_0) };
    let at = (ETHERNET + F::IP + at) as u32;
    // A partial checksum covers the addresses alone: the parts cannot be joined.
    unsafe {
        bpf_l4_csum_replace(skb, at, 0, addresses as u64, PSEUDO_HEADER | mangled);
        bpf_l4_csum_replace(skb, at, 0, ports as u64, mangled);
    }
    true
}

#[xdp(frags)]
pub fn floor_direct_xdp4(ctx: XdpContext) -> u32 {
    in_front_xdp::<V4, false>(ctx.ctx)
}

#[xdp(frags)]
pub fn floor_direct_xdp6(ctx: XdpContext) -> u32 {
    in_front_xdp::<V6, false>(ctx.ctx)
}

#[xdp(frags)]
pub fn floor_udp_xdp4(ctx: XdpContext) -> u32 {
    in_front_xdp::<V4, true>(ctx.ctx)
}

#[xdp(frags)]
pub fn floor_udp_xdp6(ctx: XdpContext) -> u32 {
    in_front_xdp::<V6, true>(ctx.ctx)
}

#[classifier]
pub fn floor_udp_tc4(ctx: TcContext) -> i32 {
    in_front_tc::<V4, true>(ctx.skb.skb)
}

#[classifier]
pub fn floor_udp_tc6(ctx: TcContext) -> i32 {
    in_front_tc::<V6, true>(ctx.skb.skb)
}

#[xdp(frags)]
pub fn floor_udp_new_xdp4(ctx: XdpContext) -> u32 {
    new_xdp::<V4, true>(ctx.ctx)
}

#[xdp(frags)]
pub fn floor_udp_new_xdp6(ctx: XdpContext) -> u32 {
    new_xdp::<V6, true>(ctx.ctx)
}

#[classifier]
pub fn floor_udp_new_tc4(ctx: TcContext) -> i32 {
    new_tc::<V4, true>(ctx.skb.skb)
}

#[classifier]
pub fn floor_udp_new_tc6(ctx: TcContext) -> i32 {
    new_tc::<V6, true>(ctx.skb.skb)
}

#[xdp(frags)]
pub fn floor_direct_new_xdp4(ctx: XdpContext) -> u32 {
    new_xdp::<V4, false>(ctx.ctx)
}

#[xdp(frags)]
pub fn floor_direct_new_xdp6(ctx: XdpContext) -> u32 {
    new_xdp::<V6, false>(ctx.ctx)
}

#[classifier]
pub fn floor_direct_tc4(ctx: TcContext) -> i32 {
    in_front_tc::<V4, false>(ctx.skb.skb)
}

#[classifier]
pub fn floor_direct_tc6(ctx: TcContext) -> i32 {
    in_front_tc::<V6, false>(ctx.skb.skb)
}

#[classifier]
pub fn floor_direct_new_tc4(ctx: TcContext) -> i32 {
    new_tc::<V4, false>(ctx.skb.skb)
}

#[classifier]
pub fn floor_direct_new_tc6(ctx: TcContext) -> i32 {
    new_tc::<V6, false>(ctx.skb.skb)
}

#[classifier]
pub fn floor_open_tc4(ctx: TcContext) -> i32 {
    open::<V4, false>(ctx.skb.skb)
}

#[classifier]
pub fn floor_open_tc6(ctx: TcContext) -> i32 {
    open::<V6, false>(ctx.skb.skb)
}

#[classifier]
pub fn floor_open_udp_tc4(ctx: TcContext) -> i32 {
    open::<V4, true>(ctx.skb.skb)
}

#[classifier]
pub fn floor_open_udp_tc6(ctx: TcContext) -> i32 {
    open::<V6, true>(ctx.skb.skb)
}

#[classifier]
pub fn floor_back_tc4(ctx: TcContext) -> i32 {
    translate::<V4>(ctx.skb.skb);
    TC_NEXT
}

#[classifier]
pub fn floor_back_tc6(ctx: TcContext) -> i32 {
    translate::<V6>(ctx.skb.skb);
    TC_NEXT
}

/// Katran's method: it looks up the address that is served, takes the endpoint that the connection
/// had last from an LRU table, or else from the ring of hashes, looks up that one's address, and
/// writes an outer header. It has no states; its counters, its check of an ended UDP stream and its
/// second table for other hosts' flows are left out.
#[xdp(frags)]
pub fn katran_xdp4(ctx: XdpContext) -> u32 {
    let md = ctx.ctx;
    let Some(tuple) = parse::<V4>(unsafe { (*md).data } as usize, unsafe { (*md).data_end } as usize) else {
        return XDP_PASS;
    };
    let mut entry = MaybeUninit::uninit();
    if choose(&tuple, &mut entry).is_none() {
        return XDP_PASS;
    }
    wrap_xdp::<V4, false>(md, entry.as_ptr())
}

#[inline(always)]
fn choose(tuple: &Tuple<Address4>, entry: &mut MaybeUninit<FloorFlow>) -> Option<()> {
    let key = FrontendKey {
        address: tuple.destination,
        port: tuple.ports.destination(),
        protocol: tuple.protocol as u16,
        scope: scope::ADDRESS,
    };
    lookup::<_, Frontend>(V4::frontends(), &key)?;
    let lru = (&raw const KATRAN_LRU).cast_mut().cast::<c_void>();
    let real = if let Some(known) = lookup::<_, u64>(lru, tuple) {
        unsafe { *known }
    } else {
        let place = hash::pick(hash::tuple(tuple, 1), RING);
        let real = unsafe { *KATRAN_RING.get_ptr(place)? } as u64;
        let key = core::ptr::from_ref(tuple).cast::<c_void>().cast_mut();
        unsafe { bpf_map_update_elem(lru, key, (&raw const real).cast_mut().cast(), 0) };
        real
    };
    let slot = V4::slot(real as u32)?;
    entry.write(V4::towards(V4::node()?, unsafe { (*slot).address }));
    Some(())
}
