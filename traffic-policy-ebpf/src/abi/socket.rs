//! Sockets of this node and its pods whose destination was translated to an endpoint.

use super::Port;

/// Key of `tp_sockets` and `tp_conn_udp`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct SocketKey {
    /// The kernel's number of the socket; never used twice.
    pub cookie: u64,
    /// [`Address::wide`][super::Address::wide] of the other end: the endpoint, or in a forward entry what the application
    /// named.
    pub address: [u64; 2],
    pub port: Port,
    pub protocol: u8,
    /// 0: keyed by the endpoint, for replies; 1: keyed by the frontend, for datagrams of an unconnected socket.
    pub forward: u8,
    pub ipv6: u32,
}

/// What the other end is for the application, or, in a forward entry, the endpoint that datagrams go to.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Socket {
    pub address: [u64; 2],
    pub port: Port,
    pub zero: u16,
    /// Index of the Service port.
    pub service: u32,
    /// Cookie of the network namespace.
    pub netns: u64,
    /// In a forward entry: the endpoint's place within its list, which may have been written anew since.
    pub offset: u32,
    /// In a forward entry: when a datagram went by it last, in seconds of CLOCK_MONOTONIC; 0 = the endpoint is gone.
    pub used: u32,
}

/// Which sources new flows may have: `--source-check`.
pub mod source_check {
    pub const OFF: u32 = 0;
    /// None that no packet from outside can have.
    pub const MARTIAN: u32 = 1;
    /// And only those to which this node's routes lead by the device that the packet came by.
    pub const STRICT: u32 = 2;
}

/// This node, as sockets and new flows need to know it. One element of `tp_local_node`, written by the agent.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Node {
    /// Cookie of the network namespace that the node's own processes live in.
    pub netns: u64,
    /// Wide form of the node's primary addresses: IPv4, IPv6; zero if it has none.
    pub primary: [[u64; 2]; 2],
    /// Wide form of the first address of the node's pod ranges: IPv4, IPv6; zero if not known.
    pub pods: [[u64; 2]; 2],
    /// Prefix lengths of these ranges, for display; the packet path does not read them.
    pub pod_bits: [u32; 2],
    /// The same as masks, in wide form; zero if not known.
    pub pod_masks: [[u64; 2]; 2],
    /// See [`source_check`].
    pub source_check: u32,
    pub zero: u32,
}
