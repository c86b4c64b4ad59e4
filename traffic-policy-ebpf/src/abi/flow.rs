//! Flow entries: what becomes of the packets of a flow.

use super::{Address, Ports, Tuple};

/// Kinds of flow entry, which say what is done with a packet.
pub mod kind {
    /// Request entry, endpoint on another node: both addresses rewritten, sent to the next hop.
    pub const FORWARD: u8 = 1;
    /// Reply entry of [`FORWARD`].
    pub const REPLY: u8 = 2;
    /// Request entry, endpoint on this node: destination rewritten, handed to the stack.
    pub const DELIVER: u8 = 3;
    /// Reply entry of [`DELIVER`], seen at TC egress.
    pub const REPLY_LOCAL: u8 = 4;
    /// Request entry of a connection that began under an earlier proxy: conntrack goes on translating it, so its packets are
    /// handed to the stack as they are. Written and removed by the agent alone.
    pub const LEFT: u8 = 5;
    /// Reply entry of [`LEFT`]: it keeps the source port that conntrack has chosen from being given to another flow.
    pub const LEFT_REPLY: u8 = 6;
}

/// A flow entry, of requests or of replies: all that an established packet needs.
///
/// IPv4: 48 bytes of the kernel's element + 16 of key + 64 = two cache lines.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Flow<A: Address> {
    /// Address bits of the matched packets that the key omits.
    pub kept: A::Kept,
    /// Addresses and ports that the packet gets.
    pub source: A,
    pub destination: A,
    pub ports: Ports,
    /// Difference of the one's complement sums of the addresses, and of the ports: [`crate::checksum`].
    pub address_delta: u16,
    pub port_delta: u16,
    /// Index into `tp_nexthops`, valid while `epoch` is the current route epoch. [`REPLY_LOCAL`][kind::REPLY_LOCAL]: 0 where the kernel
    /// routes the packet, and else the hop that it is redirected to; asked only if it leaves by another device than `ifindex`.
    pub hop: u16,
    /// Of `hop`: one aligned word with it, which is read and written as one.
    pub epoch: u16,
    /// See [`kind`].
    pub kind: u8,
    /// See [`crate::tcp`].
    pub state: u8,
    /// The first two bytes of the MAC address that sent the request: see `ifindex`.
    pub mac_head: [u8; 2],
    /// Time of the last packet: low half of jiffies.
    pub last: u32,
    /// Index of the Service port.
    pub service: u32,
    pub packets: u64,
    /// Bytes of IP packets. Reply entry of TCP without a packet: the SYN's numbers, as the request entry has them.
    pub bytes: u64,
    /// TCP: sequence and acknowledgement number of the last segment, host order; before the flow is assured, as in the table of
    /// [`crate::tcp::numbers`].
    pub numbers: u64,
    /// Reply entry: the device by which the request came, and the MAC address that sent it, which is used only if there is no
    /// route to the client. Request entry: its place in `tp_flow_dir4` or `tp_flow_dir6`; 0 if it has none.
    pub ifindex: u32,
    /// Request entry: jiffies, native byte order, of a SYN that came when the flow was assured; 0 if none did.
    pub mac_tail: [u8; 4],
}

impl<A: Address> Flow<A> {
    /// Packets, and bytes of IP packets.
    pub const fn traffic(&self) -> (u64, u64) {
        (self.packets, if self.packets == 0 { 0 } else { self.bytes })
    }

    /// The tuple of the packets that this entry's packets become.
    #[inline(always)]
    pub fn translated(&self, protocol: u32) -> Tuple<A> {
        Tuple { source: self.source, destination: self.destination, ports: self.ports, protocol }
    }
}
