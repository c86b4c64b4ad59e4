//! Sockets of this node and its pods whose destination was translated to an endpoint.

use super::{Port, WideAddress};

/// Key of `tp_sockets` and `tp_conn_udp`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct SocketKey {
    /// The kernel's number of the socket; never used twice.
    pub cookie: u64,
    /// The other end: the endpoint, or in a forward entry what the application named.
    pub address: WideAddress,
    pub port: Port,
    pub protocol: u8,
    /// 0: keyed by the endpoint, for replies; 1: keyed by the frontend, for datagrams of an
    /// unconnected socket.
    pub forward: u8,
    pub ipv6: u32,
}

/// The peer that the application sees, or, in a forward entry, the endpoint that datagrams go to.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct TranslatedSocket {
    pub address: WideAddress,
    pub port: Port,
    pub zero: u16,
    /// Index of the Service port.
    pub service: u32,
    /// Cookie of the network namespace.
    pub netns: u64,
    /// In a forward entry: the endpoint's place within its list, which may have been written anew
    /// since.
    pub offset: u32,
    /// In a forward entry: when a datagram went by it last, in seconds of CLOCK_MONOTONIC; 0 = the
    /// endpoint is gone.
    pub used: u32,
}
