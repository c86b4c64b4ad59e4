//! Cilium's method of direct server return, in front: the endpoint's address takes the place of the
//! Service's, and the first packet says in an option of IPv4 what was there.

use core::mem::MaybeUninit;

use aya_ebpf::{
    bindings::xdp_md,
    btf_maps::{HashMap, LruHashMap},
    cty::c_void,
    helpers::{bpf_jiffies64, bpf_map_update_elem, bpf_xdp_adjust_head},
    macros::{btf_map, xdp},
    programs::XdpContext,
};
use traffic_policy_bench_ebpf::{CILIUM_OPTION, CiliumConnection};
use traffic_policy_ebpf::{
    abi::{Address4, Frontend, FrontendKey, Ports, Slot, Tuple, scope},
    checksum::{self, TTL_STEP},
    hash,
    words::{load8, load16, load32, load64, store8, store16, store32, store64},
};

use super::{
    ETHERNET, TCP, XDP_PASS, XDP_TX,
    family::{Family, V4},
    lookup, parse,
};
use crate::floor;

/// The endpoint that a connection had last: as `cilium_ct4_global`, with entries as large.
#[btf_map]
pub static CILIUM_CONNECTIONS: LruHashMap<Tuple<Address4>, CiliumConnection, 262_144> = LruHashMap::new();
/// The endpoints by their numbers: as `cilium_lb4_backends_v3`.
#[btf_map]
pub static CILIUM_BACKENDS: HashMap<u32, Slot<Address4>, 65_536, 1> = HashMap::new();
/// The pods of this node: as `cilium_lxc`. None of them is an endpoint.
#[btf_map]
pub static CILIUM_PODS: HashMap<[u32; 5], u64, 65_536, 1> = HashMap::new();

/// The bytes of an IPv4 header without options, and of the option.
const HEADER: usize = 20;
const OPTION: usize = 8;
/// The lifetime of a connection in jiffies; which one does not matter here.
const LIFETIME: u64 = 21_600_000;
const SYN: u8 = 2;

/// Sends a request of TCP to its endpoint: the Service, the connection or else an endpoint for it,
/// the endpoint's address, the translation, whether it is on this node, the option of a SYN, and
/// the FIB for each packet. What Cilium does besides is left out: tail calls, counters, its other
/// tables for packets that come by a tunnel, are encrypted or are to be dropped.
/// <https://github.com/cilium/cilium/blob/v1.16.0/bpf/lib/nodeport.h> (`nodeport_svc_lb4`,
/// `tail_nodeport_ipv4_dsr`)
#[xdp(frags)]
pub fn cilium_xdp4(ctx: XdpContext) -> u32 {
    send(ctx.ctx).map_or(XDP_PASS, |()| XDP_TX)
}

#[inline(always)]
fn send(md: *mut xdp_md) -> Option<()> {
    let (data, end) = unsafe { ((*md).data as usize, (*md).data_end as usize) };
    let tuple = parse::<V4>(data, end)?;
    let (ip, l4) = (data + ETHERNET, data + ETHERNET + HEADER);
    if tuple.protocol != TCP || l4 + 20 > end {
        return None;
    }
    let number = backend(&tuple)?;
    let backend = lookup::<_, Slot<Address4>>((&raw const CILIUM_BACKENDS).cast_mut().cast(), &number)?;
    let (address, port) = unsafe { ((*backend).address, (*backend).port) };
    let ports = Ports::new(tuple.ports.source(), port);
    let addresses = checksum::delta(tuple.destination.wire().into(), address.wire().into());
    let delta = checksum::delta(checksum::port_sum(tuple.ports), checksum::port_sum(ports));
    store32::<16>(ip, address.wire());
    store32::<0>(l4, ports.wire());
    store16::<10>(ip, checksum::update(load16::<10>(ip), addresses));
    store16::<16>(l4, checksum::update(load16::<16>(l4), checksum::add(addresses, delta)));
    let flags = load8::<13>(l4);
    let pod = [address.wire(), 0, 0, 0, 1];
    if lookup::<_, u64>((&raw const CILIUM_PODS).cast_mut().cast(), &pod).is_some() {
        return None;
    }
    if flags & SYN != 0 {
        name_service(md, &tuple)?;
    }
    let (macs, tail) = floor::macs(md, tuple.source, address)?;
    let (data, end) = unsafe { ((*md).data as usize, (*md).data_end as usize) };
    let ip = data + ETHERNET;
    if ip + HEADER > end {
        return None;
    }
    store64::<0>(data, macs);
    store32::<8>(data, tail);
    store8::<8>(ip, load8::<8>(ip) - 1);
    store16::<10>(ip, checksum::update(load16::<10>(ip), TTL_STEP));
    Some(())
}

/// Returns the number of the connection's endpoint, which is chosen and kept for its first packet.
#[inline(always)]
fn backend(tuple: &Tuple<Address4>) -> Option<u32> {
    let service = || {
        let key = FrontendKey {
            address: tuple.destination,
            port: tuple.ports.destination(),
            protocol: tuple.protocol as u16,
            scope: scope::ADDRESS,
        };
        lookup::<_, Frontend>(V4::frontends(), &key)
    };
    let found = service()?;
    let connections = (&raw const CILIUM_CONNECTIONS).cast_mut().cast::<c_void>();
    let now = unsafe { bpf_jiffies64() };
    if let Some(known) = lookup::<_, CiliumConnection>(connections, tuple) {
        let known = known.cast_mut();
        unsafe { (*known).lifetime = now + LIFETIME };
        return Some(unsafe { (*known).backend });
    }
    let place = hash::pick(hash::tuple(tuple, 1), unsafe { (*found).cluster.len });
    // The numbers of endpoints are values of the table of Services, too, by the Service and a
    // place.
    service()?;
    let mut entry = MaybeUninit::<CiliumConnection>::uninit();
    entry.write(CiliumConnection { lifetime: now + LIFETIME, backend: place, zero: [0; 11] });
    let (key, value) = (core::ptr::from_ref(tuple).cast::<c_void>(), entry.as_ptr().cast::<c_void>());
    let result = unsafe { bpf_map_update_elem(connections, key.cast_mut(), value.cast_mut(), 0) };
    (result == 0).then_some(place)
}

/// Adds the option that names the address and the port of the Service.
#[inline(always)]
fn name_service(md: *mut xdp_md, tuple: &Tuple<Address4>) -> Option<()> {
    if unsafe { bpf_xdp_adjust_head(md, -(OPTION as i32)) } != 0 {
        return None;
    }
    let (data, end) = unsafe { ((*md).data as usize, (*md).data_end as usize) };
    let (ip, former) = (data + ETHERNET, data + ETHERNET + OPTION);
    if former + HEADER > end {
        return None;
    }
    // The IP header is read before it is written, since both places overlap. The MAC addresses come
    // last.
    store16::<12>(data, V4::ETHERTYPE);
    let words = [load64::<0>(former), load64::<8>(former)];
    let last = load32::<16>(former);
    store64::<0>(ip, words[0]);
    store64::<8>(ip, words[1]);
    store32::<16>(ip, last);
    let (before, length) = (load16::<0>(ip), load16::<2>(ip));
    let first = u16::from_ne_bytes([0x47, before.to_ne_bytes()[1]]);
    let longer = (u16::from_be(length) + OPTION as u16).to_be();
    let option = (CILIUM_OPTION | tuple.ports.destination().to_host() as u32).to_be();
    store16::<0>(ip, first);
    store16::<2>(ip, longer);
    store32::<20>(ip, option);
    store32::<24>(ip, tuple.destination.wire());
    let sum = |word: u32| (word & 0xffff) as u64 + (word >> 16) as u64;
    let after = first as u64 + longer as u64 + sum(option) + sum(tuple.destination.wire());
    let delta = checksum::delta(before as u64 + length as u64, after);
    store16::<10>(ip, checksum::update(load16::<10>(ip), delta));
    Some(())
}
