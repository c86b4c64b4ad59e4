//! The packet in its XDP or TC context, behind the trait [`Packet`]; what TC alone can do, behind
//! [`Skb`].

pub mod tc;
pub mod xdp;

use core::arch::asm;

use aya_ebpf::cty::c_void;
use traffic_policy_ebpf::abi::{Piece, jump};

use crate::datapath::{family::Family, maps::Table};

/// The number of the helper BPF_FUNC_tail_call.
const TAIL_CALL: i32 = 12;

/// The length in bytes of headers that need no further pull: Ethernet, IPv4 with all options, TCP.
pub const LINEAR: u32 = 14 + 60 + 20;

/// The `gso_size` of an aggregate of whole SCTP packets, each of its own length: GSO_BY_FRAGS.
/// <https://github.com/torvalds/linux/blob/v6.12/include/linux/skbuff.h>
pub const BY_FRAGMENTS: u32 = 0xffff;

/// A packet in XDP or TC.
pub trait Packet: Copy {
    /// The packet as TC has it.
    type Skb: Skb;
    /// The kernel's structure.
    type Context;

    const TC: bool;
    /// Whether the program is one for SCTP: such programs see SCTP packets only, and the others see
    /// none.
    const SCTP: bool;
    /// Whether the program is on the host side of a pod's device (`--pod-services on`): packets
    /// come from a pod of this node, and the stack delivers what is translated.
    const POD: bool;
    /// The bytes before the IP header: an Ethernet header, or none.
    const L2: usize;
    const PASS: i32;
    const DROP: i32;
    /// The hook of this context, for incoming packets.
    const HOOK: u32;

    /// Returns the packet as TC has it; `None` in XDP.
    fn skb(self) -> Option<Self::Skb>;
    /// Returns the packet of a context that the kernel or [`Self::raw`] has given.
    fn of(context: *mut Self::Context) -> Self;
    fn raw(self) -> *mut c_void;
    /// The first byte of the frame: the Ethernet header, where there is one.
    fn data(self) -> usize;
    /// The first byte after the directly readable part.
    fn end(self) -> usize;
    /// Makes the first `wanted` bytes of the frame directly readable, or as many as it has.
    /// Pointers into the packet become invalid. Only the common headers of an aggregate of SCTP
    /// packets can be read.
    fn pull(self, wanted: u32);
    /// The word at `offset` of a frame, even if it is not directly readable; 0 if the frame is too
    /// short.
    fn distant_word(self, offset: u32) -> u32;
    /// The length in bytes of the whole frame, readable or not. XDP: of its first buffer; the rest
    /// of a jumbo frame may lie in others.
    fn length(self) -> u32;
    /// Whether the whole frame, in one buffer or several, has `length` bytes or more.
    fn holds(self, length: u32) -> bool;
    fn ingress(self) -> u32;
    /// Whether the frame is addressed to this machine, not flooded to it by a switch that has not
    /// learned the address.
    fn is_for_host(self) -> bool;
    /// The payload bytes of each segment that this aggregate becomes on the wire; 0 if it is no
    /// aggregate.
    fn segment(self) -> u32;
    /// Sends the packet out of a device and returns the verdict.
    fn send(self, ifindex: u32) -> i32;
    /// Sends the packet as [`Self::send`] does. In TC, a `receive` of 1 hands it to the stack as if
    /// it had arrived by the device. `receive` is a number so that the verifier walks the call
    /// once.
    fn send_or_receive(self, ifindex: u32, receive: u32) -> i32;
    /// Cuts or extends the frame to `length` bytes. Pointers into the packet become invalid. False:
    /// the frame is unchanged. XDP refuses frames of several buffers.
    fn resize(self, length: u32) -> bool;
    /// Makes the frame `length` bytes long, as [`Self::resize`] does; what is behind its Ethernet
    /// header is undefined then. `opened`: the kernel may still mark it as encapsulated, in TC.
    fn renew(self, length: u32, opened: bool) -> bool;
    /// Makes room for `bytes` of an outer header, of IPv6 or IPv4, and that of UDP behind it if
    /// `udp` is 1, in front of the IP header. Pointers into the packet become invalid. False: the
    /// frame is unchanged.
    fn make_room(self, bytes: u32, v6: bool, udp: u32) -> bool;
    /// Removes `bytes` of outer headers behind the Ethernet header, which has to be written anew in
    /// XDP. Pointers into the packet become invalid. False: the frame is unchanged.
    fn remove_room(self, bytes: u32) -> bool;
    /// Calls [`window_scale`][crate::datapath::parse::window_scale] as a global function.
    fn window_scale(self, offset: u32) -> i32;
    /// Calls [`check_options`][crate::datapath::parse::variable::check_options] as a global
    /// function.
    fn check_options(self, header: u32) -> i32;
    /// Calls [`walk_headers`][crate::datapath::parse::ipv6_ext::walk_headers] as a global function.
    fn walk_headers(self, offset: u32) -> i32;
    /// The programs that can be jumped to.
    fn jumps() -> Table;
    /// Continues with another program of [`jump`]; returns only if it is missing.
    ///
    /// The call is written in assembly so that jumps to different programs stay apart. The compiler
    /// would merge them into one, with an index that the kernel does not know beforehand, and then
    /// the kernel jumps through the array (20 ns) instead of directly.
    #[inline(always)]
    fn jump<F: Family, const PROGRAM: u32>(self) {
        // SAFETY: a helper of the kernel, called as the compiler would call it: the verifier checks
        // its arguments.
        unsafe {
            asm!("r3 = {index}", "call {tail_call}", index = const F::INDEX as u32 * jump::FAMILY + PROGRAM,
                tail_call = const TAIL_CALL, inlateout("r1") self.raw() => _, inlateout("r2") Self::jumps().raw() => _,
                lateout("r0") _, lateout("r3") _, lateout("r4") _, lateout("r5") _, options(nostack));
        }
    }
}

/// A packet in TC: what the kernel's socket buffer knows, and can do, beyond a frame.
pub trait Skb: Packet {
    /// The device by which the packet came to this node, at egress; 0 if the packet was created
    /// here.
    fn came_by(self) -> u32;
    /// The mark by which the packet was routed.
    fn mark(self) -> u32;
    /// Notes a number in the packet, in place of its flow's hash: it stays there while the packet
    /// passes other devices of this network namespace, and in all packets that the kernel makes of
    /// it. <https://github.com/torvalds/linux/blob/v6.12/net/core/skbuff.c> (`__copy_skb_header`)
    fn note_number(self, number: u32);
    /// The number that [`Self::note_number`] has noted.
    fn number(self) -> u32;
    /// Whether this node's program of another hook, or of another device, has redirected the packet
    /// here; at egress.
    fn is_redirected(self) -> bool;
    /// The EtherType of the packet as the kernel knows it, memory order.
    fn protocol(self) -> u16;
    /// Whether the device took a VLAN tag out of the frame.
    fn tagged(self) -> bool;
    /// Whether such a tag names no VLAN, only a priority (IEEE 802.1Q: VLAN 0).
    fn is_priority_tag(self) -> bool;
    /// Copies `length` bytes of the frame from `offset` on; `length` is not 0 and at most the size
    /// of `room`. False: the frame is shorter.
    fn copy_out(self, offset: u32, room: *mut Piece, length: u32) -> bool;
    /// Copies a piece into the frame, as [`Self::copy_out`] copies one out. Pointers into the
    /// packet become invalid.
    fn copy_in(self, offset: u32, piece: *const Piece, length: u32) -> bool;
    /// Sends the packet to a neighbour that the kernel resolves, and returns the verdict.
    /// `neighbour` is the kernel's `struct bpf_redir_neigh`.
    fn send_to(self, ifindex: u32, neighbour: *mut [u32; 5]) -> i32;
    /// Adds differences to the transport checksum, complete or partial. Pointers into the packet
    /// become invalid.
    fn fix_checksum(self, offset: u32, address_delta: u16, port_delta: u16, udp: bool, v6: bool) -> bool;
    /// Sends the packet by this node's route to its destination, which has to use this device, and
    /// returns the verdict.
    fn send_routed(self, ifindex: u32) -> i32;
    /// Hands the packet to the device at the other end of a pod's device, as if it had come by it,
    /// and returns the verdict. At ingress only. The other end must be in another network namespace
    /// and up: the kernel drops the packet otherwise.
    fn send_peer(self, ifindex: u32) -> i32;
    /// Puts an Ethernet header with empty addresses in front of a packet of a device without
    /// Ethernet. False: the kernel refused, and the packet is unchanged. Pointers into it become
    /// invalid.
    fn push_ethernet(self, ethertype: u16) -> bool;
    /// Makes room for `bytes` of an outer header as `make_room` does, and leaves the packet's mark
    /// of encapsulation as it is: it may have one already, or must have none. Pointers into the
    /// packet become invalid. False: the frame is unchanged.
    fn make_unmarked_room(self, bytes: u32) -> bool;
    /// Adds a difference to the sum over the frame, if a device has computed one.
    fn update_sum(self, delta: u16);
}
