//! Frontends: the addresses on which Service ports are reached; source ranges and Service CIDRs.

use super::Port;

/// Scopes of a [`FrontendKey`].
pub mod scope {
    /// An address, port and protocol as packets carry them.
    pub const ADDRESS: u32 = 0;
    /// A node port at no certain address, which is zero: for packets to another node's address
    /// which that has forwarded directly to this one; and, if its kind is
    /// [`LOOPBACK`][super::frontend_kind::LOOPBACK], for sockets of the node's own network
    /// namespace on the loopback addresses.
    pub const NODE_PORT: u32 = 1;
    /// A ClusterIP as such: port and protocol are zero. Ports of it without a frontend of their own
    /// lead nowhere.
    pub const CLUSTER_IP: u32 = 2;
}

/// The key of the frontends.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct FrontendKey<A> {
    pub address: A,
    pub port: Port,
    pub protocol: u16,
    /// See [`scope`].
    pub scope: u32,
}

/// The key of a source range in a longest-prefix trie: the Service port in full, then a prefix of
/// the source. `W` is 1 word for IPv4, 4 for IPv6, in memory order.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SourceRange<const W: usize> {
    pub service: u32,
    pub address: [u32; W],
}

/// The key of one packet's look-up in the trie: a [`SourceRange`] behind its length in bits.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SourceQuery<A> {
    pub bits: u32,
    pub service: u32,
    pub address: A,
}

/// A range that ClusterIPs are allocated from, in a longest-prefix trie. `W` as in [`SourceRange`].
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ServiceCidr<const W: usize> {
    pub address: [u32; W],
}

/// The key of a look-up in that trie; `#[repr(C, packed(4))]`, because the address directly follows
/// the length.
#[repr(C, packed(4))]
#[derive(Clone, Copy)]
pub struct ServiceCidrQuery<A> {
    pub bits: u32,
    pub address: A,
}

/// Consecutive indices of an array map, such as the slots of a list in `tp_endpoints`; written as
/// one aligned word.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct IndexRange {
    pub base: u32,
    pub len: u32,
}

/// Flags of a [`Frontend`].
pub mod frontend {
    /// The policy in effect is Local: for a ClusterIP to all clients, for other frontends to
    /// packets from outside.
    pub const LOCAL: u32 = 1;
    /// One endpoint or more, on any node, takes new connections.
    pub const HAS_ENDPOINTS: u32 = 2;
    /// The address belongs to this node: packets without a flow may be for the stack.
    pub const NODE_ADDRESS: u32 = 4;
    /// Only sources in the Service's ranges are served.
    pub const SOURCE_RANGES: u32 = 8;
    /// The connections of an earlier proxy are not in the flow tables yet: a packet that has no
    /// flow and opens none goes to the stack.
    pub const ADOPTING: u32 = 16;
    /// Packets travel unchanged to endpoints of nodes that open them:
    /// [`SLOT_OPENS`][crate::abi::SLOT_OPENS].
    pub const DIRECT: u32 = 32;
    /// The endpoints of the list for policy Cluster are chosen by the table in
    /// [`Frontend::maglev`][super::Frontend]; sockets choose at random.
    pub const MAGLEV: u32 = 64;
    /// The endpoint of a frontend with both, [`DIRECT`] and [`MAGLEV`], follows from addresses and
    /// ports on every node alike, so packets may go to its node without being told:
    /// [`SLOT_L2`][crate::abi::SLOT_L2].
    pub const L2: u32 = 128;
    /// The nodes of the endpoints of a [`DIRECT`] frontend are asked to send replies back through
    /// this node.
    pub const TUNNEL: u32 = 4096;
    /// Replies that come back through this node are opened. It stays when [`TUNNEL`] is taken away:
    /// open flows go on as they began.
    pub const OPENS_REPLIES: u32 = 2048;
    /// The position of the [`kind`][super::frontend_kind] within the flags.
    pub const KIND_SHIFT: u32 = 8;

    /// The kind of a frontend with these flags: see [`super::frontend_kind`].
    #[inline(always)]
    pub const fn kind(flags: u32) -> u32 {
        flags >> KIND_SHIFT & 7
    }

    /// Whether a frontend with these flags is a node port, at whatever address.
    #[inline(always)]
    pub const fn is_node_port(flags: u32) -> bool {
        use super::frontend_kind::{LOOPBACK, NODE_PORT, OPENED};
        // Without a branch for each: a bit for each kind.
        (1 << NODE_PORT | 1 << LOOPBACK | 1 << OPENED) >> kind(flags) & 1 != 0
    }
}

/// Kinds of frontend address.
pub mod frontend_kind {
    pub const CLUSTER_IP: u32 = 1;
    pub const NODE_PORT: u32 = 2;
    pub const LOAD_BALANCER: u32 = 3;
    pub const EXTERNAL_IP: u32 = 4;
    /// A node port on the loopback addresses, and of packets that another node has forwarded
    /// directly.
    pub const LOOPBACK: u32 = 5;
    /// A node port of packets that another node has forwarded directly alone.
    pub const OPENED: u32 = 6;
}

/// An address on which a Service port is reached.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Frontend {
    /// The index of the Service port.
    pub service: u32,
    /// See [`frontend`].
    pub flags: u32,
    /// The slots of the endpoints for policy Cluster, and for policy Local.
    pub cluster: IndexRange,
    pub local: IndexRange,
    /// The Maglev table of `cluster`: the first element in `tp_maglev`, and the number of slots.
    pub maglev: IndexRange,
    /// The time in CLOCK_MONOTONIC nanoseconds until which new flows are still forwarded to other
    /// nodes although the policy is Local and no endpoint is on this node; 0 = not draining.
    pub drain_until: u64,
    /// The seconds for which a client keeps its endpoint (`sessionAffinity: ClientIP`), counted
    /// from its last new connection; 0 = no affinity.
    pub affinity: u32,
    /// The check word of the Maglev table, by which a later agent recognises it.
    pub digest: u32,
    /// The tables of former owners, one after the other, each with as many slots as `maglev`: the
    /// first element in `tp_maglev`, and the number of tables, at most
    /// [`maglev::FORMER`][crate::abi::maglev::FORMER]. The first names the last owner before the
    /// present one.
    pub former: IndexRange,
    /// The slots of the endpoints in which those tables give places.
    pub former_list: IndexRange,
    /// The time in CLOCK_MONOTONIC nanoseconds until which former owners are asked.
    pub former_until: u64,
}
