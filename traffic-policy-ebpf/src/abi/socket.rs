//! Sockets of this node and its pods whose destination was translated to an endpoint.

use super::{Port, WideAddress};

/// The key of `tp_sockets` and `tp_conn_udp`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct SocketKey {
    /// The kernel's number of the socket, never used twice.
    pub cookie: u64,
    /// The peer: the endpoint, or in a forward entry the address that the application named.
    pub address: WideAddress,
    pub port: Port,
    pub protocol: u8,
    /// 0: keyed by the endpoint, for replies; 1: keyed by the frontend, for datagrams of an
    /// unconnected socket.
    pub forward: u8,
    pub ipv6: u32,
}

/// The peer that the application sees, or, in a forward entry, the endpoint that receives the
/// datagrams.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct TranslatedSocket {
    pub address: WideAddress,
    pub port: Port,
    /// The number of the endpoint's node in `tp_node_names`, for a TCP socket; 0: the endpoint has
    /// no `nodeName`, or is on this node.
    pub node: u16,
    /// The index of the Service port.
    pub service: u32,
    /// The cookie of the network namespace.
    pub netns: u64,
    /// The endpoint's place within its list, in a forward entry; the list may have been rewritten
    /// since.
    pub offset: u32,
    /// The time of the last datagram of a forward entry, in seconds of CLOCK_MONOTONIC; 0 = the
    /// endpoint was removed.
    pub used: u32,
}
