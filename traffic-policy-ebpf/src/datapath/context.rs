//! The two kinds of context behind one set of verbs.

use core::arch::asm;

use aya_ebpf::{
    Global,
    bindings::{__sk_buff, xdp_md},
    cty::c_void,
    helpers::{
        bpf_csum_update, bpf_l4_csum_replace, bpf_redirect, bpf_redirect_neigh, bpf_skb_change_tail,
        bpf_skb_pull_data, bpf_xdp_adjust_tail,
    },
};

use traffic_policy_ebpf::abi::{Device, hook, jump};

use crate::datapath::{
    family::Family,
    maps::{DEVICES, TC_JUMPS, Table, XDP_JUMPS},
    wire::{load16, load32, opaque},
};

/// BPF_FUNC_tail_call
const TAIL_CALL: i32 = 12;

/// `skb->pkt_type` of a frame for this machine.
const PACKET_HOST: u32 = 0;

const XDP_DROP: i32 = 1;
const XDP_PASS: i32 = 2;
const XDP_TX: i32 = 3;
const XDP_REDIRECT: i32 = 4;
/// TC_ACT_UNSPEC and TCX_NEXT: whoever comes next decides, as if we were not there.
const TC_NEXT: i32 = -1;
const TC_SHOT: i32 = 2;

/// BPF_F_IPV6 where the kernel knows it (Linux 6.16), else 0. Set by the agent at load.
#[unsafe(no_mangle)]
static CHECKSUM_IPV6: Global<u64> = Global::new(0);

const PSEUDO_HEADER: u64 = 1 << 4;
const MARK_MANGLED_0: u64 = 1 << 5;

/// Headers that fit here need no further pull: Ethernet, IPv4 with all options, TCP.
pub const LINEAR: u32 = 14 + 60 + 20;

/// A packet in XDP or TC.
pub trait Packet: Copy {
    const TC: bool;
    const PASS: i32;
    const DROP: i32;
    /// The hook of this context, for packets that come in.
    const HOOK: u32;

    fn raw(self) -> *mut c_void;
    /// First byte of the Ethernet header.
    fn data(self) -> usize;
    /// First byte after what can be read directly.
    fn end(self) -> usize;
    /// Makes the first bytes of the frame readable directly, `wanted` of them or as many as it has. Pointers into the packet
    /// are void after it.
    fn reach(self, wanted: u32);
    /// Bytes of the whole frame, readable or not.
    fn length(self) -> u32;
    fn ingress(self) -> u32;
    /// A VLAN tag that the device took out of the frame.
    fn tagged(self) -> bool;
    /// Whether the frame is for this machine: not flooded to it by a switch that does not know better.
    fn for_us(self) -> bool;
    /// Payload bytes of each segment that this aggregate becomes on the wire, 0 if it is no aggregate.
    fn segment(self) -> u32;
    /// Sends it out of a device: the verdict.
    fn send(self, ifindex: u32) -> i32;
    /// Cuts or extends the frame. Pointers into the packet are void after it.
    fn resize(self, length: u32) -> bool;
    /// The programs to jump to.
    fn jumps() -> Table;
    /// Goes on with another program of [`jump`]; returns only if it is missing.
    ///
    /// Written out so that jumps to different programs stay apart. The compiler would make one of them, with a number that the
    /// kernel does not know beforehand, and then the kernel jumps by way of the array (20 ns) instead of directly.
    #[inline(always)]
    fn jump<F: Family, const PROGRAM: u32>(self) {
        unsafe {
            asm!("r3 = {index}", "call {tail_call}", index = const F::INDEX as u32 * jump::FAMILY + PROGRAM,
                tail_call = const TAIL_CALL, inlateout("r1") self.raw() => _, inlateout("r2") Self::jumps().raw() => _,
                lateout("r0") _, lateout("r3") _, lateout("r4") _, lateout("r5") _, options(nostack));
        }
    }
    /// TC only: sends it to a neighbour that the kernel resolves: the verdict.
    /// `neighbour` is the kernel's `struct bpf_redir_neigh`.
    fn send_to(self, ifindex: u32, neighbour: *mut [u32; 5]) -> i32;
    /// TC only: adds differences to the transport checksum, complete or partial. Pointers into the packet are void
    /// after it.
    fn fix_checksum(self, offset: u32, address_delta: u16, port_delta: u16, udp: bool, v6: bool) -> bool;
    /// Adds a difference to the sum over the frame that a device has computed, if one has.
    fn update_sum(self, delta: u16);
}

#[derive(Clone, Copy)]
pub struct Xdp {
    md: *mut xdp_md,
    /// Where it came in: three loads for the kernel, so done early.
    ingress: u32,
}

impl Xdp {
    #[inline(always)]
    pub fn new(md: *mut xdp_md) -> Self {
        Self { md, ingress: unsafe { (*md).ingress_ifindex } }
    }
}

impl Packet for Xdp {
    const TC: bool = false;
    const PASS: i32 = XDP_PASS;
    const DROP: i32 = XDP_DROP;
    const HOOK: u32 = hook::XDP;

    #[inline(always)]
    fn raw(self) -> *mut c_void {
        self.md.cast()
    }
    #[inline(always)]
    fn data(self) -> usize {
        unsafe { (*self.md).data as usize }
    }
    #[inline(always)]
    fn end(self) -> usize {
        unsafe { (*self.md).data_end as usize }
    }
    #[inline(always)]
    fn reach(self, _: u32) {}
    #[inline(always)]
    fn length(self) -> u32 {
        (self.end() - self.data()) as u32
    }
    #[inline(always)]
    fn ingress(self) -> u32 {
        self.ingress
    }
    #[inline(always)]
    fn tagged(self) -> bool {
        false
    }
    #[inline(always)]
    fn for_us(self) -> bool {
        let ifindex = self.ingress();
        let Some(device) = Table::of(&raw const DEVICES).lookup::<u32, Device>(&ifindex) else { return true };
        let data = self.data();
        if data + 14 > self.end() {
            return false;
        }
        let (head, tail) = unsafe { (load32::<0>(data).to_ne_bytes(), load16::<4>(data).to_ne_bytes()) };
        let mac = unsafe { (*device).mac };
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
        unsafe { bpf_redirect(ifindex, 0) };
        XDP_REDIRECT
    }
    #[inline(always)]
    fn resize(self, length: u32) -> bool {
        // The verifier lets the end be part of one difference only: with the beginning.
        let by = length as i32 - opaque(self.length() as u64) as i32;
        unsafe { bpf_xdp_adjust_tail(self.md, by) == 0 }
    }
    #[inline(always)]
    fn jumps() -> Table {
        Table::of(&raw const XDP_JUMPS)
    }
    #[inline(always)]
    fn send_to(self, _: u32, _: *mut [u32; 5]) -> i32 {
        XDP_DROP
    }
    #[inline(always)]
    fn fix_checksum(self, _: u32, _: u16, _: u16, _: bool, _: bool) -> bool {
        false
    }
    #[inline(always)]
    fn update_sum(self, _: u16) {}
}

#[derive(Clone, Copy)]
pub struct Tc {
    skb: *mut __sk_buff,
}

impl Tc {
    #[inline(always)]
    pub fn new(skb: *mut __sk_buff) -> Self {
        Self { skb }
    }
}

impl Packet for Tc {
    const TC: bool = true;
    const PASS: i32 = TC_NEXT;
    const DROP: i32 = TC_SHOT;
    const HOOK: u32 = hook::INGRESS;

    #[inline(always)]
    fn raw(self) -> *mut c_void {
        self.skb.cast()
    }
    #[inline(always)]
    fn data(self) -> usize {
        unsafe { (*self.skb).data as usize }
    }
    #[inline(always)]
    fn end(self) -> usize {
        unsafe { (*self.skb).data_end as usize }
    }
    #[inline(always)]
    fn reach(self, wanted: u32) {
        let linear = (self.end() - self.data()) as u32;
        if linear < wanted && linear < self.length() {
            let wanted = if self.length() < wanted { self.length() } else { wanted };
            unsafe { bpf_skb_pull_data(self.skb, wanted) };
        }
    }
    #[inline(always)]
    fn length(self) -> u32 {
        unsafe { (*self.skb).len }
    }
    #[inline(always)]
    fn ingress(self) -> u32 {
        unsafe { (*self.skb).ifindex }
    }
    #[inline(always)]
    fn tagged(self) -> bool {
        unsafe { (*self.skb).vlan_present != 0 }
    }
    #[inline(always)]
    fn for_us(self) -> bool {
        unsafe { (*self.skb).pkt_type == PACKET_HOST }
    }
    #[inline(always)]
    fn segment(self) -> u32 {
        unsafe { (*self.skb).gso_size }
    }
    #[inline(always)]
    fn send(self, ifindex: u32) -> i32 {
        unsafe { bpf_redirect(ifindex, 0) as i32 }
    }
    #[inline(always)]
    fn resize(self, length: u32) -> bool {
        unsafe { bpf_skb_change_tail(self.skb, length, 0) == 0 }
    }
    #[inline(always)]
    fn jumps() -> Table {
        Table::of(&raw const TC_JUMPS)
    }
    #[inline(always)]
    fn send_to(self, ifindex: u32, neighbour: *mut [u32; 5]) -> i32 {
        unsafe { bpf_redirect_neigh(ifindex, neighbour.cast(), size_of::<[u32; 5]>() as i32, 0) as i32 }
    }
    #[inline(always)]
    fn fix_checksum(self, offset: u32, address_delta: u16, port_delta: u16, udp: bool, v6: bool) -> bool {
        let mangled = if udp { MARK_MANGLED_0 } else { 0 };
        // On a device that sums whole packets (CHECKSUM_COMPLETE), the addresses of IPv6 and this checksum cancel out.
        let family = if v6 { CHECKSUM_IPV6.load() } else { 0 };
        unsafe {
            // Size 0: the last number is a difference. The address part belongs to the pseudo header, which is all that
            // a partial checksum covers.
            bpf_l4_csum_replace(self.skb, offset, 0, address_delta as u64, PSEUDO_HEADER | mangled | family)
                == 0
                && (port_delta == 0
                    || bpf_l4_csum_replace(self.skb, offset, 0, port_delta as u64, mangled) == 0)
        }
    }
    #[inline(always)]
    fn update_sum(self, delta: u16) {
        unsafe { bpf_csum_update(self.skb, delta as u32) };
    }
}
