//! A packet in XDP.

use aya_ebpf::{
    bindings::xdp_md,
    cty::c_void,
    helpers::{bpf_redirect, bpf_xdp_adjust_head, bpf_xdp_adjust_tail, bpf_xdp_get_buff_len},
};
use traffic_policy_ebpf::abi::{DeviceInfo, hook};

use super::{Packet, tc::Tc};
use crate::datapath::{
    maps::{DEVICES, Table, XDP_TAIL_CALLS},
    parse::{self, ETHERNET, ipv6_ext, variable},
    words::{load16, load32},
};

const XDP_DROP: i32 = 1;
const XDP_PASS: i32 = 2;
const XDP_TX: i32 = 3;
const XDP_REDIRECT: i32 = 4;

/// A packet in a program for SCTP or in one for the other protocols.
#[derive(Clone, Copy)]
pub struct Xdp<const SCTP: bool = false> {
    md: *mut xdp_md,
    /// The index of the ingress device. The kernel needs three loads for it, so it is read early.
    ingress: u32,
}

impl<const SCTP: bool> Xdp<SCTP> {
    #[inline(always)]
    pub fn new(md: *mut xdp_md) -> Self {
        Self { md, ingress: get!(md.ingress_ifindex) }
    }

    /// The bytes in all buffers of the frame.
    #[inline(always)]
    fn length_of_all(self) -> u32 {
        // SAFETY: a helper of the kernel: the verifier checks its arguments.
        (unsafe { bpf_xdp_get_buff_len(self.md) }) as u32
    }
}

impl<const SCTP: bool> Packet for Xdp<SCTP> {
    type Skb = Tc<SCTP>;
    type Context = xdp_md;

    const TC: bool = false;
    const SCTP: bool = SCTP;
    const POD: bool = false;
    const L2: usize = ETHERNET;
    const PASS: i32 = XDP_PASS;
    const DROP: i32 = XDP_DROP;
    const HOOK: u32 = hook::XDP;

    #[inline(always)]
    fn skb(self) -> Option<Tc<SCTP>> {
        None
    }
    #[inline(always)]
    fn of(context: *mut xdp_md) -> Self {
        Self::new(context)
    }
    #[inline(always)]
    fn raw(self) -> *mut c_void {
        self.md.cast()
    }
    #[inline(always)]
    fn data(self) -> usize {
        get!((self.md).data) as usize
    }
    #[inline(always)]
    fn end(self) -> usize {
        get!((self.md).data_end) as usize
    }
    #[inline(always)]
    fn pull(self, _: u32) {}
    #[inline(always)]
    fn length(self) -> u32 {
        (self.end() - self.data()) as u32
    }
    /// Returns 0: headers lie in the first buffer.
    #[inline(always)]
    fn distant_word(self, _: u32) -> u32 {
        0
    }
    #[inline(always)]
    fn holds(self, length: u32) -> bool {
        length <= self.length() || length <= self.length_of_all()
    }
    #[inline(always)]
    fn ingress(self) -> u32 {
        self.ingress
    }
    #[inline(always)]
    fn is_for_host(self) -> bool {
        let ifindex = self.ingress();
        let Some(device) = Table::of(&raw const DEVICES).lookup::<u32, DeviceInfo>(&ifindex) else {
            return true;
        };
        let data = self.data();
        if data + 14 > self.end() {
            return false;
        }
        let (head, tail) = (load32::<0>(data).to_ne_bytes(), load16::<4>(data).to_ne_bytes());
        let mac = get!(device.mac);
        mac == [head[0], head[1], head[2], head[3], tail[0], tail[1]]
    }
    #[inline(always)]
    fn segment(self) -> u32 {
        0
    }
    #[inline(always)]
    fn send(self, ifindex: u32) -> i32 {
        if ifindex == self.ingress() {
            return XDP_TX;
        }
        // SAFETY: a helper of the kernel: the verifier checks its arguments.
        unsafe { bpf_redirect(ifindex, 0) };
        XDP_REDIRECT
    }
    #[inline(always)]
    fn send_or_receive(self, ifindex: u32, _: u32) -> i32 {
        self.send(ifindex)
    }
    #[inline(always)]
    fn resize(self, length: u32) -> bool {
        let all = self.length_of_all();
        if self.length() < all {
            // Bytes to be written behind the headers may lie in another buffer.
            return false;
        }
        let by = length as i32 - all as i32;
        // SAFETY: a helper of the kernel: the verifier checks its arguments.
        unsafe { bpf_xdp_adjust_tail(self.md, by) == 0 }
    }
    #[inline(always)]
    fn renew(self, length: u32, _: bool) -> bool {
        self.resize(length)
    }
    #[inline(always)]
    fn make_room(self, bytes: u32, _: bool, _: u32) -> bool {
        // SAFETY: a helper of the kernel: the verifier checks its arguments.
        unsafe { bpf_xdp_adjust_head(self.md, -(bytes as i32)) == 0 }
    }
    #[inline(always)]
    fn remove_room(self, bytes: u32) -> bool {
        // SAFETY: as above.
        unsafe { bpf_xdp_adjust_head(self.md, bytes as i32) == 0 }
    }
    #[inline(always)]
    fn window_scale(self, offset: u32) -> i32 {
        window_scale_xdp(self.md, offset)
    }
    #[inline(always)]
    fn check_options(self, header: u32) -> i32 {
        check_options_xdp(self.md, header)
    }
    #[inline(always)]
    fn walk_headers(self, offset: u32) -> i32 {
        walk_headers_xdp(self.md, offset)
    }
    #[inline(always)]
    fn jumps() -> Table {
        Table::of(&raw const XDP_TAIL_CALLS)
    }
}

global_functions! {
    window_scale_xdp => window_scale, md: *mut xdp_md, offset: u32;
    check_options_xdp => check_options, md: *mut xdp_md, header: u32;
    walk_headers_xdp => walk_headers, md: *mut xdp_md, offset: u32;
}

#[inline(always)]
fn window_scale(md: *mut xdp_md, offset: u32) -> i32 {
    parse::window_scale(Xdp::<false>::new(md), offset)
}

#[inline(always)]
fn check_options(md: *mut xdp_md, header: u32) -> i32 {
    variable::check_options(Xdp::<false>::new(md), header)
}

#[inline(always)]
fn walk_headers(md: *mut xdp_md, offset: u32) -> i32 {
    ipv6_ext::walk_headers(Xdp::<false>::new(md), offset)
}
