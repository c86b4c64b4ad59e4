//! Flow entries: the translation and the state of a flow's packets.

use super::{Address, Ports, TO_OWNER, Tuple, WayBack};

/// Kinds of flow entry, which determine what happens to a packet.
pub mod kind {
    /// A request entry with its endpoint on another node: both addresses are rewritten, and the
    /// packet is sent to the next hop.
    pub const FORWARD: u8 = 1;
    /// The reply entry of [`FORWARD`].
    pub const REPLY: u8 = 2;
    /// A request entry with its endpoint on this node: the destination is rewritten, and the packet
    /// is handed to the stack.
    pub const DELIVER: u8 = 3;
    /// The reply entry of [`DELIVER`], seen at TC egress.
    pub const REPLY_LOCAL: u8 = 4;
    /// The request entry of a connection that began under an earlier proxy. conntrack goes on
    /// translating it, so its packets are handed to the stack unchanged. Only the agent writes and
    /// removes it.
    pub const LEFT: u8 = 5;
    /// The reply entry of [`LEFT`]: it keeps the source port that conntrack has chosen from being
    /// given to another flow.
    pub const LEFT_REPLY: u8 = 6;
    /// A request entry with its endpoint on another node: the packet travels unchanged within an
    /// outer packet from `source` to `destination`, which that node opens. It has no reply entry:
    /// the endpoint's replies go to the client without passing this node.
    pub const DIRECT: u8 = 7;
}

/// A flow entry, for requests or for replies: all that an established packet needs.
///
/// IPv4: 48 bytes of the kernel's element + 16 of key + 64 = two cache lines.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Flow<A: Address> {
    /// The address bits of the matched packets that the key omits.
    pub kept: A::Kept,
    /// The addresses and ports that the packet gets.
    pub source: A,
    pub destination: A,
    pub ports: Ports,
    /// The differences of the one's complement sums of the addresses, and of the ports:
    /// [`crate::checksum`]. In a [`DIRECT`][kind::DIRECT] entry, `port_delta` is the source port of
    /// the UDP that its packets travel in, memory order; 0: they travel in IP. With
    /// [`BY_MAC`][super::BY_MAC] they travel so only where they cannot be sent as they are.
    /// `address_delta` has the bits [`REPLY_THROUGH_FRONT`][super::REPLY_THROUGH_FRONT],
    /// [`TO_OWNER`] and [`BY_TABLE`][super::BY_TABLE] there.
    pub address_delta: u16,
    pub port_delta: u16,
    /// The index into `tp_nexthops`, valid while `epoch` is the current route epoch.
    /// [`DELIVER`][kind::DELIVER]: 0 where the stack delivers the packet, otherwise the pod's hop.
    /// [`REPLY_LOCAL`][kind::REPLY_LOCAL]: 0 where the kernel routes the packet, otherwise the hop
    /// that it is redirected to; read only if the packet leaves by another device than its request
    /// came by.
    pub hop: u16,
    /// The route epoch of `hop`. Both form one aligned word, which is read and written as one.
    pub epoch: u16,
    /// See [`kind`].
    pub kind: u8,
    /// See [`crate::tcp`].
    pub state: u8,
    /// Reply entry: the beginning of a MAC address. Request entry: the node of its endpoint, or the
    /// way back of replies.
    pub head: Head,
    /// The time of the last packet: low half of jiffies.
    pub last: u32,
    /// The index of the Service port.
    pub service: u32,
    pub packets: Packets,
    /// Bytes of IP packets. The reply entry of a TCP flow that has had no reply holds the SYN's
    /// numbers, as the request entry does.
    pub bytes: u64,
    /// TCP: sequence and acknowledgement number of the last segment, host order; before the flow is
    /// assured, see the table of [`crate::tcp::numbers`]. SCTP: two tags, see [`crate::sctp`]. UDP:
    /// 0; before the flow is assured, the low half holds the jiffies when it began, and the high
    /// half of a request entry the jiffies until which its datagrams need nothing but their
    /// translation.
    pub numbers: u64,
    /// Reply entry: a device. Request entry: a place in the directory.
    pub device_or_place: DeviceOrPlace,
    /// Reply entry: the end of a MAC address. Request entry: its place in the queue, or a note.
    pub tail: Tail,
}

/// A device in a reply entry, a place in a request entry.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct DeviceOrPlace(u32);

impl DeviceOrPlace {
    #[inline(always)]
    pub const fn of_device(ifindex: u32) -> Self {
        Self(ifindex)
    }

    #[inline(always)]
    pub const fn of_place(place: u32) -> Self {
        Self(place)
    }

    /// Reply entry: the index of the device by which the request came. [`Head::mac`] and
    /// [`Tail::mac`] are the MAC address that sent it, which is used only if there is no route to
    /// the client.
    #[inline(always)]
    pub const fn device(self) -> u32 {
        self.0
    }

    /// Stands in a reply entry whose packets go back through the node in front
    /// ([`Tail::way_back`]). It is the index of no device, so no packet is taken for one that
    /// leaves by the device its request came by.
    pub const TUNNELLED: Self = Self(u32::MAX);

    /// Request entry: its place in `tp_flow_dir4` or `tp_flow_dir6`; 0 if it has none.
    #[inline(always)]
    pub const fn place(self) -> u32 {
        self.0
    }
}

/// The beginning of a MAC address in a reply entry, a node in a request entry.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Head(u16);

impl Head {
    #[inline(always)]
    pub const fn of_mac(head: [u8; 2]) -> Self {
        Self(u16::from_ne_bytes(head))
    }

    #[inline(always)]
    pub const fn of_node(place: u16) -> Self {
        Self(place)
    }

    /// Reply entry: the first two bytes of the MAC address that sent the request; see
    /// [`DeviceOrPlace::device`].
    #[inline(always)]
    pub const fn mac(self) -> [u8; 2] {
        self.0.to_ne_bytes()
    }

    #[inline(always)]
    pub const fn of_way_back(way: WayBack) -> Self {
        Self(way.word())
    }

    /// Request entry of an endpoint on this node: the way back of replies.
    #[inline(always)]
    pub const fn way_back(self) -> WayBack {
        WayBack::of_word(self.0)
    }

    /// Request entry: the place of the endpoint's node in `tp_node_silence`; 0 if it has none.
    #[inline(always)]
    pub const fn node(self) -> u16 {
        self.0
    }
}

/// The end of a MAC address in a reply entry. In a request entry, native byte order: the place in
/// the queue of an unassured flow, plus 1; once the flow is assured, the note of a packet that
/// asked for a new connection.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Tail(u32);

impl Tail {
    /// Neither a place in the queue nor a note.
    pub const NONE: Self = Self(0);

    #[inline(always)]
    pub const fn of_mac(tail: [u8; 4]) -> Self {
        Self(u32::from_ne_bytes(tail))
    }

    #[inline(always)]
    pub const fn of_queue_place(place: u32) -> Self {
        Self(place.wrapping_add(1))
    }

    /// Notes a SYN that came on an assured flow, by the low half of jiffies, which must not be 0.
    #[inline(always)]
    pub const fn of_syn(jiffies: u32) -> Self {
        Self(jiffies)
    }

    /// Notes an INIT that came on an assured flow.
    #[inline(always)]
    pub const fn of_initiate_tag(tag: u32) -> Self {
        Self(tag)
    }

    #[inline(always)]
    pub const fn of_way_back(way: WayBack) -> Self {
        Self(way.word() as u32)
    }

    /// Reply entry with [`DeviceOrPlace::TUNNELLED`]: the way back of its packets.
    #[inline(always)]
    pub const fn way_back(self) -> WayBack {
        WayBack::of_word(self.0 as u16)
    }

    /// Reply entry: the last four bytes of the MAC address that sent the request.
    #[inline(always)]
    pub const fn mac(self) -> [u8; 4] {
        self.0.to_ne_bytes()
    }

    /// Request entry of an unassured flow: its place in `tp_unassured4` or `tp_unassured6`;
    /// `u32::MAX` if it has none.
    #[inline(always)]
    pub const fn queue_place(self) -> u32 {
        self.0.wrapping_sub(1)
    }

    /// Request entry of an assured TCP flow: the jiffies of the SYN that asked for another
    /// connection; 0 if none came.
    #[inline(always)]
    pub const fn syn(self) -> u32 {
        self.0
    }

    /// Request entry of an assured SCTP flow: the initiate tag of the INIT that asked for another
    /// association; 0 if none came.
    #[inline(always)]
    pub const fn initiate_tag(self) -> u32 {
        self.0
    }
}

impl<A: Address> Flow<A> {
    /// Returns the packets, and the bytes of IP packets.
    pub const fn traffic(&self) -> (u64, u64) {
        let packets = self.packets.count();
        (packets, if packets == 0 { 0 } else { self.bytes })
    }

    /// Whether another node is in front of a [`DIRECT`][kind::DIRECT] flow, and this one sends its
    /// packets on to an owner.
    pub const fn is_to_owner(&self) -> bool {
        self.address_delta & TO_OWNER != 0
    }

    /// The tuple that this entry's packets have after translation.
    #[inline(always)]
    pub fn translated(&self, protocol: u32) -> Tuple<A> {
        Tuple { source: self.source, destination: self.destination, ports: self.ports, protocol }
    }
}

/// Packets of one direction of a flow, and the window that its TCP segments offer: one word, so
/// that an established packet that raises the window has already loaded it.
///
/// | bits | |
/// |---|---|
/// | 0 to 43 | packets |
/// | 44 to 47 | window scale of its SYN or SYN-ACK, plus 1; 0 if it had none (RFC 7323 section 2) |
/// | 48 to 63 | before the first answer to a SYN, in the reply entry: the place of the endpoint's node in `tp_node_silence`; then the largest window field of its other segments, as in the header: `td_maxwin` of conntrack before it is scaled |
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Packets(u64);

/// The window field of a segment, at its place in [`Packets`]; 0 for a segment that offers none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Window(u64);

impl Window {
    pub const NONE: Self = Self(0);

    /// Places a window field in host order.
    #[inline(always)]
    pub const fn of(field: u16) -> Self {
        Self((field as u64) << 48)
    }
}

impl Packets {
    const COUNT: u64 = (1 << 44) - 1;
    const SCALE: u64 = 15 << 44;

    /// No packets yet; the endpoint's node, by its place in `tp_node_silence`, is to answer a SYN.
    #[inline(always)]
    pub const fn awaited_from(node: u16) -> Self {
        Self((node as u64) << 48)
    }

    /// The place of the endpoint's node in `tp_node_silence`, before the first answer.
    #[inline(always)]
    pub const fn node(self) -> u16 {
        (self.0 >> 48) as u16
    }

    /// A count of packets, less than 2^44, without a window.
    #[inline(always)]
    pub const fn of(count: u64) -> Self {
        Self(count)
    }

    #[inline(always)]
    pub const fn count(self) -> u64 {
        self.0 & Self::COUNT
    }

    /// The same with one packet more.
    #[inline(always)]
    pub const fn and_one(self) -> Self {
        Self(self.0 + 1)
    }

    /// The same with one packet less; the count must be at least one.
    #[inline(always)]
    pub const fn less_one(self) -> Self {
        Self(self.0 - 1)
    }

    /// Whether a window is larger than all earlier ones: one comparison.
    #[inline(always)]
    pub const fn is_below(self, window: Window) -> bool {
        self.0 < window.0
    }

    #[inline(always)]
    pub const fn with_window(self, window: Window) -> Self {
        Self(self.0 & (Self::COUNT | Self::SCALE) | window.0)
    }

    /// The same with the scale of a SYN or SYN-ACK, `None` if it has no such option. Windows of an
    /// earlier connection are forgotten.
    #[inline(always)]
    pub const fn with_scale(self, scale: Option<u8>) -> Self {
        let scale = match scale {
            // RFC 7323 section 2.3: a larger scale is taken as 14.
            Some(scale) => (if scale > 14 { 14 } else { scale }) as u64 + 1,
            None => 0,
        };
        Self(self.0 & Self::COUNT | scale << 44)
    }

    #[inline(always)]
    const fn scale(self) -> u32 {
        ((self.0 & Self::SCALE) >> 44) as u32
    }

    /// The largest window that this direction has offered, in bytes, at most 2^30. It is scaled
    /// only if both sides have sent the option.
    #[inline(always)]
    pub const fn offered(self, other: Self) -> u32 {
        let field = (self.0 >> 48) as u32;
        if self.scale() == 0 || other.scale() == 0 { field } else { field << (self.scale() - 1) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_count_a_scale_and_a_window_do_not_touch() {
        let packets = Packets::of(7).with_scale(Some(7)).with_window(Window::of(500)).and_one();
        assert_eq!(packets.count(), 8);
        let other = Packets::of(0).with_scale(Some(0));
        assert_eq!(packets.offered(other), 500 << 7);
        assert_eq!(packets.offered(Packets::of(0)), 500, "the other side does not scale");
        assert_eq!(other.with_window(Window::of(9)).offered(packets), 9);
        assert!(packets.is_below(Window::of(501)) && !packets.is_below(Window::of(500)));
        assert!(!packets.is_below(Window::NONE));
        assert_eq!(packets.with_window(Window::of(u16::MAX)).less_one().count(), 7);
        let again = packets.with_scale(Some(15));
        assert_eq!((again.count(), again.with_window(Window::of(1)).offered(other)), (8, 1 << 14));
        assert_eq!(packets.with_scale(None).with_window(Window::of(600)).offered(other), 600);
    }
}
