//! The minimum work of replies through the node in front: translated and sent within an outer
//! packet at the endpoint's node; opened in front, after one look-up, and sent on.

use aya_ebpf::{
    bindings::__sk_buff,
    helpers::{bpf_redirect, bpf_skb_adjust_room},
    macros::classifier,
    programs::TcContext,
};
use traffic_policy_ebpf::{
    abi::{Frontend, FrontendKey, scope},
    words::load16,
};

use super::{
    BEHIND_MAC, ETHERNET, FIXED_GSO, TC_NEXT,
    family::{Family, V4, V6},
    lookup, parse, translate, wrap_tc, write_macs,
};

#[inline(always)]
fn send_back<F: Family>(skb: *mut __sk_buff) -> i32 {
    let Some(node) = F::node() else { return TC_NEXT };
    if !translate::<F>(skb) {
        return TC_NEXT;
    }
    wrap_tc::<F, false>(skb, node)
}

#[inline(always)]
fn open<F: Family>(skb: *mut __sk_buff) -> i32 {
    let (data, end) = unsafe { ((*skb).data as usize, (*skb).data_end as usize) };
    if data + ETHERNET + 2 * F::IP > end
        || load16::<12>(data) != F::ETHERTYPE
        || F::protocol(data + ETHERNET) != F::OUTER
        || unsafe { bpf_skb_adjust_room(skb, -(F::IP as i32), BEHIND_MAC, FIXED_GSO) } != 0
    {
        return TC_NEXT;
    }
    let (data, end) = unsafe { ((*skb).data as usize, (*skb).data_end as usize) };
    let Some(tuple) = parse::<F>(data, end) else { return TC_NEXT };
    let key = FrontendKey {
        address: tuple.source,
        port: tuple.ports.source(),
        protocol: tuple.protocol as u16,
        scope: scope::ADDRESS,
    };
    let Some(node) = F::node() else { return TC_NEXT };
    if lookup::<_, Frontend>(F::frontends(), &key).is_none() {
        return TC_NEXT;
    }
    write_macs::<F>(data, node);
    unsafe { bpf_redirect((*skb).ifindex, 0) as i32 }
}

#[classifier]
pub fn floor_send_back_tc4(ctx: TcContext) -> i32 {
    send_back::<V4>(ctx.skb.skb)
}

#[classifier]
pub fn floor_send_back_tc6(ctx: TcContext) -> i32 {
    send_back::<V6>(ctx.skb.skb)
}

#[classifier]
pub fn floor_open_reply_tc4(ctx: TcContext) -> i32 {
    open::<V4>(ctx.skb.skb)
}

#[classifier]
pub fn floor_open_reply_tc6(ctx: TcContext) -> i32 {
    open::<V6>(ctx.skb.skb)
}
