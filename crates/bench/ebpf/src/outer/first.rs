//! The minimum work for the first packet of a flow at the endpoint's node: its outer headers
//! removed, its Service and endpoint found, an entry for each direction, and translated.

use core::mem::MaybeUninit;

use aya_ebpf::{bindings::__sk_buff, macros::classifier, programs::TcContext};
use traffic_policy_ebpf::{
    abi::{Address, Ports, Tuple},
    checksum::{delta, port_sum},
};

use super::{
    TC_NEXT,
    family::{Family, V4, V6},
    insert, parse, pick, translate_by, unwrap,
};

#[inline(always)]
fn open<F: Family, const UDP: bool>(skb: *mut __sk_buff) -> i32 {
    if unwrap::<F, UDP>(skb) {
        enter::<F>(skb);
    }
    TC_NEXT
}

/// Inserts both entries of a flow, and translates its first packet.
#[inline(always)]
fn enter<F: Family>(skb: *mut __sk_buff) -> Option<()> {
    let (data, end) = unsafe { ((*skb).data as usize, (*skb).data_end as usize) };
    let sent = parse::<F>(data, end)?;
    let slot = pick::<F>(&sent)?;
    let (address, port) = unsafe { ((*slot).address, (*slot).port) };
    let got = Tuple { destination: address, ports: Ports::new(sent.ports.source(), port), ..sent };
    let (was, is) = (sent.destination.sum(), address.sum());
    let (were, are) = (port_sum(sent.ports), port_sum(got.ports));
    let mut entry = MaybeUninit::uninit();
    entry.write(F::entry(&sent.reversed(), (delta(is, was), delta(are, were))));
    insert::<F>(&got.reversed(), &entry)?;
    entry.write(F::entry(&got, (delta(was, is), delta(were, are))));
    insert::<F>(&sent, &entry)?;
    translate_by::<F>(skb, sent.protocol, entry.as_ptr()).then_some(())
}

#[classifier]
pub fn floor_open_new_tc4(ctx: TcContext) -> i32 {
    open::<V4, false>(ctx.skb.skb)
}

#[classifier]
pub fn floor_open_new_tc6(ctx: TcContext) -> i32 {
    open::<V6, false>(ctx.skb.skb)
}

#[classifier]
pub fn floor_open_new_udp_tc4(ctx: TcContext) -> i32 {
    open::<V4, true>(ctx.skb.skb)
}

#[classifier]
pub fn floor_open_new_udp_tc6(ctx: TcContext) -> i32 {
    open::<V6, true>(ctx.skb.skb)
}
