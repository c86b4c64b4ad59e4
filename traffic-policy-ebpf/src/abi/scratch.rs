//! Scratch memory of a CPU: what one program leaves to the next, and structures too large for the
//! stack.

use super::{
    Address, Affinity, AffinityKey, ClientHops, Flow, FlowKey, Fragment, FragmentKey, Hop, Port, Ports,
    RouteQuery, Tuple,
};

/// Per-CPU scratch space: state that one program hands to the next, and structures too large for
/// its stack.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Scratch<A: Address> {
    pub request: Flow<A>,
    pub reply: Flow<A>,
    /// The kernel's `struct bpf_fib_lookup`.
    pub fib: [u64; 8],
    /// The kernel's `struct bpf_redir_neigh`: family, address.
    pub neighbour: [u32; 5],
    /// The outcome that the program of `reject` answers or counts.
    pub outcome: u32,
    /// The next hop to a client without a route: back out of the device by which its request came.
    pub ingress_device_hop: Hop,
    /// Key of the last look-up among the MTUs of routes, and what the route asked for last takes,
    /// in bytes: at most 0xffff.
    pub route: RouteQuery<A>,
    pub route_mtu: u64,
    /// For an outcome that says "too long": what would have fitted, in bytes.
    pub mtu: u32,
    /// Index of the Service port that refused the packet, or [`NO_SERVICE`][super::NO_SERVICE].
    pub service: u32,
    /// Bytes of the IP packet that is refused; its tuple is in `key`.
    pub length: u32,
    /// Words of an IPv4 packet that an ICMP error repeats.
    pub quoted_words: u32,
    /// Numbers of the entry that is being written over.
    pub former_numbers: u64,
    /// Numbers that both entries of a flow had which is being removed for its port: request, reply.
    pub claimed: [u64; 2],
    pub port_search: PortSearch,
    pub affinity_lookup: AffinityLookup<A>,
    /// The tuple of `reply`; of a packet that is refused, its own tuple.
    pub key: Tuple<A>,
    /// The tuple of `request`.
    pub opening: Tuple<A>,
    /// The tuple of another entry, while that is looked up.
    pub other: Tuple<A>,
    /// The tuple of the reply entry of a flow that makes room.
    pub former: Tuple<A>,
    /// Key of the datagram's other fragments, and the record for them.
    pub fragment_key: FragmentKey<A>,
    pub fragment: Fragment,
    /// 1 if it is a fragment.
    pub fragmented: u64,
    pub walked: ExtensionWalk,
    /// The place of `tp_flow_dir4` or `tp_flow_dir6` that this CPU took last, and the one that it
    /// looks at.
    pub directory_at: u32,
    pub directory_look: u32,
    /// The place of `tp_unassured4` or `tp_unassured6` that is looked at, and whether its flow has
    /// made room.
    pub unassured_look: u32,
    pub made_room: u32,
    /// 1: the queue of TCP is looked at first.
    pub tcp_first: u64,
    /// The key of an entry that is looked up by a callback, whose stack has no room for it.
    pub flow_key: FlowKey<A>,
    /// Next hops of the clients that had replies on this CPU.
    pub client_hops: ClientHops<A>,
}

/// Result of the walk over IPv6 extension headers.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct ExtensionWalk {
    /// TCP, UDP or SCTP; 0, not known, of a later fragment.
    pub protocol: u32,
    /// Bytes from the IP header to what follows the extension headers.
    pub offset: u32,
    /// Fragment offset in bytes, and in the lowest bit whether more follow (host order); 0 if the
    /// packet is whole.
    pub fragment: u32,
    /// Of the fragment header, memory order.
    pub identification: u32,
}

/// The search for a free source port.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct PortSearch {
    /// Ports of the client's packet, and of the packet that the endpoint gets.
    pub client_ports: Ports,
    pub ports: Ports,
    pub endpoint_port: Port,
    /// 1: a port may be taken over from a flow that has ended.
    pub takes_over: u16,
    /// Next place in `tp_snat_ports`, and how many there are.
    pub at: u32,
    pub pool_len: u32,
    /// Places from this try to the next. It grows from try to try where not every port is tried, so
    /// that a run of taken ports is left soon.
    pub step: u32,
    /// Result of the last insertion: 0, or a negative error number.
    pub result: i32,
    /// Jiffies.
    pub now: u32,
    /// 1: the request entry is there, and is written over.
    pub stays: u32,
    /// Hash by which free places of the directory are tried.
    pub spread: u32,
}

/// Notes while the endpoint of a client with affinity is looked for.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct AffinityLookup<A> {
    pub key: AffinityKey,
    pub value: Affinity,
    /// An endpoint that a client had at this time or before is forgotten: nanoseconds,
    /// CLOCK_MONOTONIC.
    pub valid_from: u64,
    /// The endpoint that is looked for.
    pub address: A,
    pub port: Port,
    /// 1: found, at `offset`.
    pub found: u16,
    /// The list.
    pub base: u32,
    pub len: u32,
    pub offset: u32,
}
