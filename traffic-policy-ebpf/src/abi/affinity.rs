//! Session affinity: the endpoint that a client used last (`sessionAffinity: ClientIP`).

use super::{Port, WideAddress};

/// Kinds of client identity in an affinity key.
pub mod client {
    /// The source address of the client's packets.
    pub const ADDRESS: u16 = 0;
    /// The cookie of the client's network namespace: a connection made on this node has no source
    /// address yet.
    pub const NETNS: u16 = 1;
}

/// The key of `tp_affinity`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct AffinityKey {
    /// The words of the client's [`WideAddress`], or the cookie.
    pub client: [u64; 2],
    /// The index of the Service port.
    pub service: u32,
    /// The list: 0 for policy Cluster, 1 for policy Local. A client that uses both may have two
    /// endpoints.
    pub list: u16,
    /// See [`client`].
    pub kind: u16,
}

/// The endpoint of a client. If the list has been rewritten since, `offset` may be wrong.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Affinity {
    pub endpoint: WideAddress,
    /// CLOCK_MONOTONIC nanoseconds (coarse) of the last new connection.
    pub used: u64,
    /// The endpoint's place within the list.
    pub offset: u32,
    pub port: Port,
    pub zero: u16,
}
