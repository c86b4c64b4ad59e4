//! A packet in TC, ingress or egress.

use core::ptr;

use aya_ebpf::{
    Global,
    bindings::__sk_buff,
    cty::c_void,
    helpers::{
        bpf_clone_redirect, bpf_csum_update, bpf_l4_csum_replace, bpf_redirect, bpf_redirect_neigh,
        bpf_redirect_peer, bpf_set_hash, bpf_skb_adjust_room, bpf_skb_change_head, bpf_skb_change_tail,
        bpf_skb_load_bytes, bpf_skb_pull_data, bpf_skb_store_bytes, bpf_skb_vlan_pop,
    },
};
use traffic_policy_ebpf::abi::{Piece, hook};

use super::{BY_FRAGMENTS, Packet, Skb};
use crate::datapath::{
    flow::table,
    maps::{L3_TAIL_CALLS, POD_TAIL_CALLS, TC_TAIL_CALLS, Table},
    parse::{self, ETHERNET, ipv6_ext, variable},
    words::store16,
};

/// The `skb->pkt_type` of a frame for this machine.
const PACKET_HOST: u32 = 0;

/// TC_ACT_UNSPEC and TCX_NEXT: the next program decides, as if this one did not exist.
const TC_NEXT: i32 = -1;
const TC_SHOT: i32 = 2;

/// BPF_F_IPV6 where the kernel knows it (Linux 6.16), otherwise 0. The agent sets it at load.
#[unsafe(no_mangle)]
static CHECKSUM_IPV6: Global<u64> = Global::new(0);

/// Returns the `skb->tc_index` of a packet that has been redirected: programs at egress let it
/// through. The kernel keeps that field with the packet, also while a neighbour is being resolved
/// (which overwrites `skb->cb`), and only old queueing disciplines (GRED) read it.
///
/// The kernel also keeps it when the packet enters another network namespace. In a cluster of nodes
/// on one machine (kind, nodes within pods) the next node must not mistake it for its own mark. So
/// the mark is a secret number of each node, never 0; the verifier sees a constant.
#[inline(always)]
fn redirected() -> u16 {
    let [_, secret] = table::multipliers().0;
    (secret >> 48) as u16 | 1
}

/// The mask of the VLAN identifier in a tag.
const VLAN: u32 = 0xfff;

/// BPF_F_RECOMPUTE_CSUM: updates a sum over the frame that the device has computed.
const RECOMPUTE_SUM: u64 = 1;

/// BPF_ADJ_ROOM_MAC: behind the Ethernet header.
const BEHIND_MAC: u32 = 1;
/// The bytes that are added or removed there at once, and how often for one packet: 9,000 bytes in
/// three.
const MOST: i32 = 0xfff;
const CHANGES: u32 = 3;
/// BPF_F_ADJ_ROOM_FIXED_GSO: the segments of an aggregate keep their length, which was compared
/// with the MTU.
const FIXED_GSO: u64 = 1;
/// BPF_F_ADJ_ROOM_ENCAP_L3_IPV4 and BPF_F_ADJ_ROOM_ENCAP_L3_IPV6.
const ENCAPSULATED_IPV4: u64 = 2;
const ENCAPSULATED_IPV6: u64 = 4;
/// The bit of BPF_F_ADJ_ROOM_ENCAP_L4_UDP.
const ENCAPSULATED_UDP: u32 = 4;

const PSEUDO_HEADER: u64 = 1 << 4;
const MARK_MANGLED_0: u64 = 1 << 5;

/// A packet with `L2` bytes before its IP header, in a program for SCTP or in one for the other
/// protocols, and with `POD` at a pod's device.
#[derive(Clone, Copy)]
pub struct SkBuff<const L2: usize, const SCTP: bool, const POD: bool = false> {
    skb: *mut __sk_buff,
}

/// A packet of a device with Ethernet.
pub type Tc<const SCTP: bool = false> = SkBuff<ETHERNET, SCTP>;
/// A packet at the host side of a pod's device.
pub type TcPod<const SCTP: bool = false> = SkBuff<ETHERNET, SCTP, true>;
/// A packet of a device without Ethernet, such as IPIP, WireGuard and tun: it begins with its IP
/// header.
pub type TcL3<const SCTP: bool = false> = SkBuff<0, SCTP>;

impl<const L2: usize, const SCTP: bool, const POD: bool> SkBuff<L2, SCTP, POD> {
    #[inline(always)]
    pub fn new(skb: *mut __sk_buff) -> Self {
        Self { skb }
    }

    /// Makes or removes room behind the Ethernet header.
    #[inline(always)]
    fn adjust(self, by: i32, flags: u64) -> bool {
        // SAFETY: a helper of the kernel: the verifier checks its arguments.
        unsafe { bpf_skb_adjust_room(self.skb, by, BEHIND_MAC, flags) == 0 }
    }

    /// Marks a redirected packet for the egress program of its outgoing device.
    #[inline(always)]
    fn note_redirected(self) {
        let skb = self.skb;
        set!(skb.tc_index = redirected() as u32);
    }
}

impl<const SCTP: bool> Tc<SCTP> {
    /// Removes a tag that the device, or the kernel, took out of the frame. Pointers into the
    /// packet become invalid.
    #[inline(always)]
    pub fn untag(self) -> bool {
        // SAFETY: a helper of the kernel: the verifier checks its arguments.
        unsafe { bpf_skb_vlan_pop(self.skb) == 0 }
    }

    /// Sends a copy of the frame unchanged. Pointers into the packet become invalid.
    #[inline(always)]
    pub fn send_copy(self, ifindex: u32) -> bool {
        self.note_redirected();
        // SAFETY: as above.
        unsafe { bpf_clone_redirect(self.skb, ifindex, 0) == 0 }
    }
}

impl<const L2: usize, const SCTP: bool, const POD: bool> Packet for SkBuff<L2, SCTP, POD> {
    type Skb = Self;
    type Context = __sk_buff;

    const TC: bool = true;
    const SCTP: bool = SCTP;
    const POD: bool = POD;
    const L2: usize = L2;
    const PASS: i32 = TC_NEXT;
    const DROP: i32 = TC_SHOT;
    const HOOK: u32 = hook::INGRESS;

    #[inline(always)]
    fn skb(self) -> Option<Self> {
        Some(self)
    }
    #[inline(always)]
    fn of(context: *mut __sk_buff) -> Self {
        Self::new(context)
    }
    #[inline(always)]
    fn raw(self) -> *mut c_void {
        self.skb.cast()
    }
    #[inline(always)]
    fn data(self) -> usize {
        get!((self.skb).data) as usize
    }
    #[inline(always)]
    fn end(self) -> usize {
        get!((self.skb).data_end) as usize
    }
    #[inline(always)]
    fn pull(self, wanted: u32) {
        let linear = (self.end() - self.data()) as u32;
        // The chunks of an aggregate of SCTP packets lie in a list of packets behind the headers
        // (`sctp_packet_pack`). Bytes pulled out of the first of them would be missing there, and
        // the kernel cuts the aggregate by the lengths of that list.
        if linear < wanted && linear < self.length() && self.segment() != BY_FRAGMENTS {
            let wanted = if self.length() < wanted { self.length() } else { wanted };
            // SAFETY: a helper of the kernel: the verifier checks its arguments.
            unsafe { bpf_skb_pull_data(self.skb, wanted) };
        }
    }
    #[inline(always)]
    fn distant_word(self, offset: u32) -> u32 {
        let mut word = 0u32;
        // SAFETY: a helper of the kernel: the verifier checks its arguments. If it fails it writes
        // zeros.
        unsafe { bpf_skb_load_bytes(self.skb.cast(), offset, (&raw mut word).cast(), 4) };
        word
    }
    #[inline(always)]
    fn holds(self, length: u32) -> bool {
        length <= self.length()
    }
    #[inline(always)]
    fn length(self) -> u32 {
        get!((self.skb).len)
    }
    #[inline(always)]
    fn ingress(self) -> u32 {
        get!((self.skb).ifindex)
    }
    #[inline(always)]
    fn is_for_host(self) -> bool {
        get!((self.skb).pkt_type) == PACKET_HOST
    }
    #[inline(always)]
    fn segment(self) -> u32 {
        get!((self.skb).gso_size)
    }
    #[inline(always)]
    fn send(self, ifindex: u32) -> i32 {
        self.note_redirected();
        // SAFETY: a helper of the kernel: the verifier checks its arguments.
        unsafe { bpf_redirect(ifindex, 0) as i32 }
    }
    #[inline(always)]
    fn send_or_receive(self, ifindex: u32, receive: u32) -> i32 {
        // BPF_F_INGRESS is 1. SAFETY: a helper of the kernel: the verifier checks its arguments.
        unsafe { bpf_redirect(ifindex, receive as u64) as i32 }
    }
    #[inline(always)]
    fn resize(self, length: u32) -> bool {
        // SAFETY: a helper of the kernel: the verifier checks its arguments.
        unsafe { bpf_skb_change_tail(self.skb, length, 0) == 0 }
    }
    /// The kernel refuses to change the tail of a packet that is marked as encapsulated, as one
    /// that was opened still is if it was sent on this machine, or merged by GRO. What it adds or
    /// removes at the head, at most [`MOST`] bytes at once, it leaves to the program. Aggregates
    /// would stay such.
    /// <https://github.com/torvalds/linux/blob/v6.12/net/core/filter.c> (`__bpf_skb_change_tail`)
    #[inline(always)]
    fn renew(self, length: u32, opened: bool) -> bool {
        if self.resize(length) {
            return true;
        }
        if !opened || self.segment() != 0 {
            return false;
        }
        for _ in 0..CHANGES {
            let by = length.wrapping_sub(self.length()) as i32;
            if by == 0 {
                break;
            }
            if !self.adjust(if by < -MOST { -MOST } else { by }, FIXED_GSO) {
                return false;
            }
        }
        // What was behind the bytes that are gone may lie in pages.
        self.pull(length);
        self.length() == length
    }
    #[inline(always)]
    fn make_room(self, bytes: u32, v6: bool, udp: u32) -> bool {
        let encapsulated = if v6 { ENCAPSULATED_IPV6 } else { ENCAPSULATED_IPV4 };
        self.adjust(bytes as i32, FIXED_GSO | encapsulated | (udp as u64) << ENCAPSULATED_UDP)
    }
    #[inline(always)]
    fn remove_room(self, bytes: u32) -> bool {
        self.adjust(-(bytes as i32), FIXED_GSO)
    }
    #[inline(always)]
    fn window_scale(self, offset: u32) -> i32 {
        window_scale_tc(self.skb, offset)
    }
    #[inline(always)]
    fn check_options(self, header: u32) -> i32 {
        if L2 == 0 { check_options_l3(self.skb, header) } else { check_options_tc(self.skb, header) }
    }
    #[inline(always)]
    fn walk_headers(self, offset: u32) -> i32 {
        walk_headers_tc(self.skb, offset)
    }
    #[inline(always)]
    fn jumps() -> Table {
        if POD {
            Table::of(&raw const POD_TAIL_CALLS)
        } else if L2 == 0 {
            Table::of(&raw const L3_TAIL_CALLS)
        } else {
            Table::of(&raw const TC_TAIL_CALLS)
        }
    }
}

impl<const L2: usize, const SCTP: bool, const POD: bool> Skb for SkBuff<L2, SCTP, POD> {
    #[inline(always)]
    fn copy_out(self, offset: u32, room: *mut Piece, length: u32) -> bool {
        // SAFETY: a helper of the kernel: the verifier checks its arguments.
        unsafe { bpf_skb_load_bytes(self.skb.cast(), offset, room.cast(), length) == 0 }
    }
    #[inline(always)]
    fn copy_in(self, offset: u32, piece: *const Piece, length: u32) -> bool {
        // SAFETY: a helper of the kernel: the verifier checks its arguments.
        unsafe { bpf_skb_store_bytes(self.skb, offset, piece.cast(), length, RECOMPUTE_SUM) == 0 }
    }
    #[inline(always)]
    fn came_by(self) -> u32 {
        // SAFETY: the pointer is the context that the kernel passed.
        unsafe { (*self.skb).ingress_ifindex }
    }
    #[inline(always)]
    fn mark(self) -> u32 {
        get!((self.skb).mark)
    }
    #[inline(always)]
    fn note_number(self, number: u32) {
        // SAFETY: a helper of the kernel: the verifier checks its arguments.
        unsafe { bpf_set_hash(self.skb, number) };
    }
    #[inline(always)]
    fn number(self) -> u32 {
        get!((self.skb).hash)
    }
    #[inline(always)]
    fn is_redirected(self) -> bool {
        get!((self.skb).tc_index) == redirected() as u32
    }
    #[inline(always)]
    fn protocol(self) -> u16 {
        get!((self.skb).protocol) as u16
    }
    #[inline(always)]
    fn tagged(self) -> bool {
        get!((self.skb).vlan_present) != 0
    }
    #[inline(always)]
    fn is_priority_tag(self) -> bool {
        get!((self.skb).vlan_tci) & VLAN == 0
    }
    #[inline(always)]
    fn send_to(self, ifindex: u32, neighbour: *mut [u32; 5]) -> i32 {
        self.note_redirected();
        // SAFETY: a helper of the kernel: the verifier checks its arguments.
        unsafe { bpf_redirect_neigh(ifindex, neighbour.cast(), size_of::<[u32; 5]>() as i32, 0) as i32 }
    }
    #[inline(always)]
    fn send_routed(self, ifindex: u32) -> i32 {
        self.note_redirected();
        // SAFETY: a helper of the kernel: the verifier checks its arguments.
        unsafe { bpf_redirect_neigh(ifindex, ptr::null_mut(), 0, 0) as i32 }
    }
    #[inline(always)]
    fn send_peer(self, ifindex: u32) -> i32 {
        let skb = self.skb;
        // A packet that the stack hands over loses its mark, but not one that is redirected.
        set!(skb.mark = 0);
        // SAFETY: a helper of the kernel: the verifier checks its arguments.
        unsafe { bpf_redirect_peer(ifindex, 0) as i32 }
    }
    #[inline(always)]
    fn fix_checksum(self, offset: u32, address_delta: u16, port_delta: u16, udp: bool, v6: bool) -> bool {
        let mangled = if udp { MARK_MANGLED_0 } else { 0 };
        // On a device that sums whole packets (CHECKSUM_COMPLETE), the addresses of IPv6 and this
        // checksum cancel out.
        let family = if v6 { CHECKSUM_IPV6.load() } else { 0 };
        // SAFETY: a helper of the kernel: the verifier checks its arguments.
        unsafe {
            // Size 0: the last number is a difference. The address part belongs to the pseudo
            // header, which is all that a partial checksum covers.
            bpf_l4_csum_replace(self.skb, offset, 0, address_delta as u64, PSEUDO_HEADER | mangled | family)
                == 0
                && (port_delta == 0
                    || bpf_l4_csum_replace(self.skb, offset, 0, port_delta as u64, mangled) == 0)
        }
    }
    #[inline(always)]
    fn push_ethernet(self, ethertype: u16) -> bool {
        // SAFETY: a helper of the kernel: the verifier checks its arguments.
        if unsafe { bpf_skb_change_head(self.skb, ETHERNET as u32, 0) } != 0 {
            return false;
        }
        let data = self.data();
        if data + ETHERNET > self.end() {
            return false;
        }
        store16::<12>(data, ethertype);
        true
    }
    #[inline(always)]
    fn make_unmarked_room(self, bytes: u32) -> bool {
        self.adjust(bytes as i32, FIXED_GSO)
    }
    #[inline(always)]
    fn update_sum(self, delta: u16) {
        // SAFETY: a helper of the kernel: the verifier checks its arguments.
        unsafe { bpf_csum_update(self.skb, delta as u32) };
    }
}

global_functions! {
    window_scale_tc => window_scale, skb: *mut __sk_buff, offset: u32;
    check_options_tc => check_options::<ETHERNET>, skb: *mut __sk_buff, header: u32;
    check_options_l3 => check_options::<0>, skb: *mut __sk_buff, header: u32;
    walk_headers_tc => walk_headers, skb: *mut __sk_buff, offset: u32;
}

#[inline(always)]
fn window_scale(skb: *mut __sk_buff, offset: u32) -> i32 {
    parse::window_scale(Tc::<false>::new(skb), offset)
}

#[inline(always)]
fn check_options<const L2: usize>(skb: *mut __sk_buff, header: u32) -> i32 {
    variable::check_options(SkBuff::<L2, false>::new(skb), header)
}

#[inline(always)]
fn walk_headers(skb: *mut __sk_buff, offset: u32) -> i32 {
    ipv6_ext::walk_headers(Tc::<false>::new(skb), offset)
}
