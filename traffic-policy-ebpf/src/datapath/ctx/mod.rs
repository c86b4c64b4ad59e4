//! The packet in its context, XDP or TC, behind one trait.

pub mod tc;
pub mod xdp;

use core::arch::asm;

use aya_ebpf::cty::c_void;
use traffic_policy_ebpf::abi::jump;

use crate::datapath::{family::Family, maps::Table};

/// BPF_FUNC_tail_call
const TAIL_CALL: i32 = 12;

/// Headers that fit here need no further pull: Ethernet, IPv4 with all options, TCP.
pub const LINEAR: u32 = 14 + 60 + 20;

/// `gso_size` of an aggregate of whole SCTP packets, each of a length of its own: GSO_BY_FRAGS.
/// <https://github.com/torvalds/linux/blob/v6.12/include/linux/skbuff.h>
pub const BY_FRAGMENTS: u32 = 0xffff;

/// A packet in XDP or TC.
pub trait Packet: Copy {
    const TC: bool;
    /// Whether its program is one of SCTP's: all packets that come to those are SCTP, and none that
    /// come to others.
    const SCTP: bool;
    /// Bytes before the IP header: Ethernet's, or none.
    const L2: usize;
    const PASS: i32;
    const DROP: i32;
    /// The hook of this context, for packets that come in.
    const HOOK: u32;

    fn raw(self) -> *mut c_void;
    /// First byte of the frame: of the Ethernet header, where there is one.
    fn data(self) -> usize;
    /// First byte after what can be read directly.
    fn end(self) -> usize;
    /// Makes the first bytes of the frame readable directly, `wanted` of them or as many as it has.
    /// Pointers into the packet are void after it. Of an aggregate of SCTP packets only their
    /// common headers can be read.
    fn pull(self, wanted: u32);
    /// The word at `offset` of a frame, also where it cannot be read directly; 0 where the frame
    /// has none.
    fn distant_word(self, offset: u32) -> u32;
    /// Bytes of the whole frame, readable or not. XDP: of its first buffer; the rest of a jumbo
    /// frame may lie in others.
    fn length(self) -> u32;
    /// Whether the whole frame, in one buffer or several, has `length` bytes or more.
    fn holds(self, length: u32) -> bool;
    fn ingress(self) -> u32;
    /// At egress: the device by which it came to this node; 0 if it was made here.
    fn came_by(self) -> u32;
    /// The mark by which it was routed.
    fn mark(self) -> u32;
    /// At egress: whether this node's program of another hook, or of another device, has sent it
    /// here.
    fn is_redirected(self) -> bool;
    /// TC only: EtherType of the packet as the kernel knows it, memory order.
    fn protocol(self) -> u16;
    /// A VLAN tag that the device took out of the frame.
    fn tagged(self) -> bool;
    /// Of a frame with such a tag: it names no VLAN, only a priority (IEEE 802.1Q: VLAN 0).
    fn is_priority_tag(self) -> bool;
    /// Whether the frame is for this machine: not flooded to it by a switch that does not know
    /// better.
    fn is_for_host(self) -> bool;
    /// Payload bytes of each segment that this aggregate becomes on the wire, 0 if it is no
    /// aggregate.
    fn segment(self) -> u32;
    /// Sends it out of a device: the verdict.
    fn send(self, ifindex: u32) -> i32;
    /// As [`Self::send`]; TC, 1: hands it to the stack as one that came by the device. A number,
    /// for one walk of the verifier.
    fn send_or_receive(self, ifindex: u32, receive: u32) -> i32;
    /// Cuts or extends the frame to `length` bytes. Pointers into the packet are void after it.
    /// False: the frame is as it was. XDP refuses frames of several buffers.
    fn resize(self, length: u32) -> bool;
    /// The programs to jump to.
    fn jumps() -> Table;
    /// Goes on with another program of [`jump`]; returns only if it is missing.
    ///
    /// Written out so that jumps to different programs stay apart. The compiler would make one of
    /// them, with a number that the kernel does not know beforehand, and then the kernel jumps by
    /// way of the array (20 ns) instead of directly.
    #[inline(always)]
    fn jump<F: Family, const PROGRAM: u32>(self) {
        // SAFETY: a helper of the kernel, as the compiler would call it: the verifier checks its
        // arguments.
        unsafe {
            asm!("r3 = {index}", "call {tail_call}", index = const F::INDEX as u32 * jump::FAMILY + PROGRAM,
                tail_call = const TAIL_CALL, inlateout("r1") self.raw() => _, inlateout("r2") Self::jumps().raw() => _,
                lateout("r0") _, lateout("r3") _, lateout("r4") _, lateout("r5") _, options(nostack));
        }
    }
    /// TC only: sends it to a neighbour that the kernel resolves: the verdict.
    /// `neighbour` is the kernel's `struct bpf_redir_neigh`.
    fn send_to(self, ifindex: u32, neighbour: *mut [u32; 5]) -> i32;
    /// TC only: adds differences to the transport checksum, complete or partial. Pointers into the
    /// packet are void after it.
    fn fix_checksum(self, offset: u32, address_delta: u16, port_delta: u16, udp: bool, v6: bool) -> bool;
    /// TC only: sends it by this node's route to its destination, which has to leave by this
    /// device: the verdict.
    fn send_routed(self, ifindex: u32) -> i32;
    /// Adds a difference to the sum over the frame that a device has computed, if one has.
    fn update_sum(self, delta: u16);
}
