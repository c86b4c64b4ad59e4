//! Session affinity: the endpoint that a client was sent to last (`sessionAffinity: ClientIP`).

use super::{Port, WideAddress};

/// Kinds of client identity in an affinity key.
pub mod client {
    /// The source address of its packets.
    pub const ADDRESS: u16 = 0;
    /// The cookie of its network namespace: a connection made on this node has no source address
    /// yet.
    pub const NETNS: u16 = 1;
}

/// Key of `tp_affinity`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct AffinityKey {
    /// The words of its [`WideAddress`], or the cookie.
    pub client: [u64; 2],
    /// Index of the Service port.
    pub service: u32,
    /// 0: in the list for policy Cluster, 1: in the one for Local. A client that uses both may have
    /// two endpoints.
    pub list: u16,
    /// See [`client`].
    pub kind: u16,
}

/// The endpoint. Where the list was written anew since, `offset` may be wrong.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Affinity {
    pub endpoint: WideAddress,
    /// CLOCK_MONOTONIC nanoseconds (coarse) of the last new connection.
    pub used: u64,
    /// Its place within the list.
    pub offset: u32,
    pub port: Port,
    pub zero: u16,
}
