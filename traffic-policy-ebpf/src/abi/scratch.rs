//! Scratch memory of a CPU: state that one program hands to the next, and structures too large for
//! the stack.

use super::{
    Address, Affinity, AffinityKey, ClientHops, Flow, FlowKey, Fragment, FragmentKey, Hop, HopKey, Port,
    Ports, RouteQuery, Slot, Tuple,
};

/// Per-CPU scratch space: state that one program hands to the next, and structures too large for
/// its stack.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Scratch<A: Address> {
    pub request: Flow<A>,
    pub reply: Flow<A>,
    /// The kernel's `struct bpf_fib_lookup`, what is asked for by it, and the route that was found.
    pub fib: [u64; 8],
    pub fib_query: FibQuery<A>,
    pub via: Via<A>,
    /// The key of the next hop that was found.
    pub hop_key: HopKey,
    /// The kernel's `struct bpf_redir_neigh`: family, address.
    pub neighbour: [u32; 5],
    /// The outcome that the program of `reject` answers or counts.
    pub outcome: u32,
    /// The next hop to a client without a route: out of the device by which its request came.
    pub ingress_device_hop: Hop,
    /// The key of the last look-up among the MTUs of routes, and the MTU of the route that was
    /// looked up last, in bytes: at most 0xffff.
    pub route: RouteQuery<A>,
    pub route_mtu: u64,
    /// The largest packet that would have fitted, in bytes, for an outcome "too long".
    pub mtu: u32,
    /// The index of the Service port that refused the packet, or [`NO_SERVICE`][super::NO_SERVICE].
    pub service: u32,
    /// The length in bytes of the IP packet that is refused; its tuple is in `key`.
    pub length: u32,
    /// The words of an IPv4 packet that an ICMP error quotes.
    pub quoted_words: u32,
    /// The numbers of the entry that is being overwritten.
    pub former_numbers: u64,
    /// The former numbers of both entries of a flow that is being removed for its port: request,
    /// reply.
    pub claimed: [u64; 2],
    pub port_search: PortSearch,
    pub affinity_lookup: AffinityLookup<A>,
    /// The tuple of `reply`; for a packet that is refused, its own tuple.
    pub key: Tuple<A>,
    /// The tuple of the packet that may create a flow: that of `request`, once this is written.
    pub opening: Tuple<A>,
    /// The tuple of another entry, during its look-up.
    pub other: Tuple<A>,
    /// The tuple of the reply entry of a flow that is removed to make room.
    pub former: Tuple<A>,
    /// The key of the datagram's other fragments, and the record for them.
    pub fragment_key: FragmentKey<A>,
    pub fragment: Fragment,
    /// 1 if the packet is a fragment.
    pub fragmented: u64,
    pub walked: ExtensionWalk,
    /// The place of `tp_flow_dir4` or `tp_flow_dir6` that this CPU took last, and the one that it
    /// is looking at.
    pub directory_at: u32,
    pub directory_look: u32,
    /// The place of `tp_unassured4` or `tp_unassured6` that is being looked at, and whether its
    /// flow has made room.
    pub unassured_look: u32,
    pub made_room: u32,
    /// 1: the queue of TCP is looked at first.
    pub tcp_first: u64,
    /// The [ways][super::way] of the new flow's packets to an endpoint on another node. Before the
    /// endpoint is known: which of these are allowed.
    pub direct: u64,
    /// The packet that was opened last, and the outer packet that is to be built.
    pub opened: Opened<A>,
    pub outer: Outer<A>,
    pub owners: OwnerSearch,
    /// The last source MAC address that was none of a node, as a key of `tp_direct_macs`, and the
    /// hop epoch under which it was looked up.
    pub router: u64,
    pub router_epoch: u64,
    /// The key of an entry that a callback looks up, whose stack has no room for it.
    pub flow_key: FlowKey<A>,
    /// The next hops of the clients that had replies on this CPU.
    pub client_hops: ClientHops<A>,
}

/// A query of the FIB.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct FibQuery<A> {
    /// Zero: this node's own address, to be chosen by the route.
    pub source: A,
    pub destination: A,
    /// The device by which the packet came.
    pub ingress: u32,
    /// The packet's mark; 0 asks without one.
    pub mark: u32,
    /// The current time: low half of jiffies.
    pub now: u32,
    /// Padding.
    pub zero: u32,
}

/// A route out of this node.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Via<A> {
    /// The address of this node that the kernel would use.
    pub source: A,
    pub ifindex: u32,
    /// The index into `tp_nexthops`; 0 if all are in use or the neighbour is not resolved.
    pub hop: u16,
    /// The route epoch of the FIB look-up.
    pub epoch: u16,
    /// 1 if a program is attached to the device. Otherwise the destination is behind this node: a
    /// pod.
    pub attached: u32,
    /// Padding.
    pub zero: u32,
}

/// The parts of an outer packet that do not follow from the inner one.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Outer<A> {
    /// The first bytes of its Ethernet header, as in [`Hop`]; 0: written by the kernel.
    pub macs: u64,
    pub source_mac_tail: u32,
    /// The device by which it leaves, and the flag
    /// [`HOP_NO_ETHERNET`][super::HOP_NO_ETHERNET] if that device has no Ethernet.
    pub ifindex: u32,
    pub flags: u16,
    /// The source port of the UDP that it travels in, memory order; 0: it travels in IP.
    pub port: u16,
    /// The owners of the connection that were asked before: 0 in all packets but those of a
    /// connection that is looked for.
    pub number: u32,
    pub source: A,
    pub destination: A,
}

/// A packet that was taken out of an outer packet, until the program that forwards it has read
/// this.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Opened<A> {
    /// The endpoint that another node has chosen, by the destination of the outer packet.
    pub endpoint: Slot<A>,
    /// The index of its Service port, or [`NO_SERVICE`][super::NO_SERVICE].
    pub service: u32,
    /// 1: such a packet is on its way to that program. 2: the same, and it may be sent on to a
    /// former owner.
    pub pending: u32,
    /// 1: it is refused, and the answer is sent by the route to the client, not to the node that
    /// sent the packet, unless `way_back` says so.
    pub routed: u32,
    /// The [`WayBack`][super::WayBack] of replies; for a reply, its own.
    pub way_back: u32,
}

/// The [`OwnerSearch::known`] of a connection that the stack of the endpoint's pod has.
pub const BY_POD: u32 = 1;
/// The [`OwnerSearch::known`] of a connection with a flow that is not used.
pub const BY_FLOW: u32 = 2;

/// The search for the owner of a connection that this node does not know.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct OwnerSearch {
    /// The owners that were asked before, as the outer packet says; 0 on the node in front.
    pub asked: u32,
    /// The number of the slot that the node in front has chosen; `u32::MAX` for an opened packet.
    pub chosen: u32,
    /// The later [`Outer::number`]. The function that builds the outer packet sets it to 0.
    pub number: u32,
    /// The holder of the connection whose flow is being created: [`BY_POD`], [`BY_FLOW`], or 0.
    pub known: u32,
    /// The numbers and the state of the request entry that its segment makes in that case, and the
    /// numbers of the reply entry.
    pub numbers: u64,
    pub reply_numbers: u64,
    pub state: u32,
    /// The Service port for whose endpoints pods are asked.
    pub service: u32,
}

/// The result of the walk over IPv6 extension headers.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct ExtensionWalk {
    /// TCP, UDP or SCTP; 0 (not known) for a later fragment.
    pub protocol: u32,
    /// The bytes from the IP header to the first header after the extension headers.
    pub offset: u32,
    /// The fragment offset in bytes, and in the lowest bit whether more fragments follow (host
    /// order); 0 if the packet is whole.
    pub fragment: u32,
    /// The identification in the fragment header, memory order.
    pub identification: u32,
}

/// The search for a free source port.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct PortSearch {
    /// The ports of the client's packet, and of the packet that the endpoint gets.
    pub client_ports: Ports,
    pub ports: Ports,
    pub endpoint_port: Port,
    /// 1: a port may be taken over from a flow that has ended.
    pub takes_over: u16,
    /// The next place in `tp_snat_ports`, and the number of places.
    pub at: u32,
    pub snat_port_count: u32,
    /// The number of places from this try to the next. Where not every port is tried, it grows from
    /// try to try, so that a run of taken ports is left soon.
    pub step: u32,
    /// The result of the last insertion: 0, or a negative error number.
    pub result: i32,
    /// The current time in jiffies.
    pub now: u32,
    /// 1: the request entry exists, and is overwritten.
    pub stays: u32,
    /// The hash by which free places of the directory are tried.
    pub spread: u32,
}

/// The state of the search for the endpoint of a client with affinity.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct AffinityLookup<A> {
    pub key: AffinityKey,
    pub value: Affinity,
    /// The time in nanoseconds, CLOCK_MONOTONIC; an endpoint that a client used at this time or
    /// earlier is forgotten.
    pub valid_from: u64,
    /// The endpoint that is searched for.
    pub address: A,
    pub port: Port,
    /// 1: found, at `offset`.
    pub found: u16,
    /// The list that is searched.
    pub base: u32,
    pub len: u32,
    pub offset: u32,
}
