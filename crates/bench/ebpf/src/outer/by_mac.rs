//! The minimum work of direct forwarding by MAC address: one look-up, and the addresses of the next
//! frame; at the endpoint's node, one look-up and the translation.

use core::mem::MaybeUninit;

use aya_ebpf::{
    bindings::{__sk_buff, xdp_md},
    helpers::bpf_redirect,
    macros::{classifier, xdp},
    programs::{TcContext, XdpContext},
};
use traffic_policy_ebpf::{
    checksum,
    words::{load16, store16, store32},
};

use super::{
    ETHERNET, TC_NEXT, TCP, XDP_PASS, XDP_TX, begin,
    family::{Family, V4, V6},
    find, parse, write_macs,
};

#[inline(always)]
fn send_xdp<F: Family>(md: *mut xdp_md) -> u32 {
    let (data, end) = unsafe { ((*md).data as usize, (*md).data_end as usize) };
    let Some(tuple) = parse::<F>(data, end) else { return XDP_PASS };
    let Some(flow) = find::<F>(&tuple) else { return XDP_PASS };
    write_macs::<F>(data, flow);
    XDP_TX
}

#[inline(always)]
fn send_tc<F: Family>(skb: *mut __sk_buff) -> i32 {
    let (data, end) = unsafe { ((*skb).data as usize, (*skb).data_end as usize) };
    let Some(tuple) = parse::<F>(data, end) else { return TC_NEXT };
    let Some(flow) = find::<F>(&tuple) else { return TC_NEXT };
    write_macs::<F>(data, flow);
    unsafe { bpf_redirect((*skb).ifindex, 0) as i32 }
}

#[inline(always)]
fn new_xdp<F: Family>(md: *mut xdp_md) -> u32 {
    let (data, end) = unsafe { ((*md).data as usize, (*md).data_end as usize) };
    let Some(tuple) = parse::<F>(data, end) else { return XDP_PASS };
    let mut entry = MaybeUninit::uninit();
    if begin::<F>(&tuple, &mut entry).is_none() {
        return XDP_PASS;
    }
    write_macs::<F>(data, entry.as_ptr());
    XDP_TX
}

#[inline(always)]
fn new_tc<F: Family>(skb: *mut __sk_buff) -> i32 {
    let (data, end) = unsafe { ((*skb).data as usize, (*skb).data_end as usize) };
    let Some(tuple) = parse::<F>(data, end) else { return TC_NEXT };
    let mut entry = MaybeUninit::uninit();
    if begin::<F>(&tuple, &mut entry).is_none() {
        return TC_NEXT;
    }
    write_macs::<F>(data, entry.as_ptr());
    unsafe { bpf_redirect((*skb).ifindex, 0) as i32 }
}

/// Translates a request for an endpoint of this node, and hands it to the stack.
#[inline(always)]
fn deliver_xdp<F: Family>(md: *mut xdp_md) -> u32 {
    let (data, end) = unsafe { ((*md).data as usize, (*md).data_end as usize) };
    let Some(tuple) = parse::<F>(data, end) else { return XDP_PASS };
    let Some(flow) = find::<F>(&tuple) else { return XDP_PASS };
    let (ip, l4) = (data + ETHERNET, data + ETHERNET + F::IP);
    if l4 + 20 > end {
        return XDP_PASS;
    }
    F::replace(ip, flow);
    store32::<0>(l4, F::ports(flow).wire());
    let (addresses, ports) = F::deltas(flow);
    let delta = checksum::add(addresses, ports);
    if tuple.protocol == TCP {
        store16::<16>(l4, checksum::update(load16::<16>(l4), delta));
    } else {
        store16::<6>(l4, checksum::update_udp(load16::<6>(l4), delta));
    }
    XDP_PASS
}

#[xdp(frags)]
pub fn floor_by_mac_xdp4(ctx: XdpContext) -> u32 {
    send_xdp::<V4>(ctx.ctx)
}

#[xdp(frags)]
pub fn floor_by_mac_xdp6(ctx: XdpContext) -> u32 {
    send_xdp::<V6>(ctx.ctx)
}

#[classifier]
pub fn floor_by_mac_tc4(ctx: TcContext) -> i32 {
    send_tc::<V4>(ctx.skb.skb)
}

#[classifier]
pub fn floor_by_mac_tc6(ctx: TcContext) -> i32 {
    send_tc::<V6>(ctx.skb.skb)
}

#[xdp(frags)]
pub fn floor_by_mac_new_xdp4(ctx: XdpContext) -> u32 {
    new_xdp::<V4>(ctx.ctx)
}

#[xdp(frags)]
pub fn floor_by_mac_new_xdp6(ctx: XdpContext) -> u32 {
    new_xdp::<V6>(ctx.ctx)
}

#[classifier]
pub fn floor_by_mac_new_tc4(ctx: TcContext) -> i32 {
    new_tc::<V4>(ctx.skb.skb)
}

#[classifier]
pub fn floor_by_mac_new_tc6(ctx: TcContext) -> i32 {
    new_tc::<V6>(ctx.skb.skb)
}

#[xdp(frags)]
pub fn floor_deliver_xdp4(ctx: XdpContext) -> u32 {
    deliver_xdp::<V4>(ctx.ctx)
}

#[xdp(frags)]
pub fn floor_deliver_xdp6(ctx: XdpContext) -> u32 {
    deliver_xdp::<V6>(ctx.ctx)
}
