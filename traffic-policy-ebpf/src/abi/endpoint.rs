//! Endpoints: those that may be chosen, and those that were removed.

use super::{Port, WideAddress};

/// An endpoint of this node, by its `nodeName` or because the address is the node's own: delivered
/// here whatever the routes say.
pub const SLOT_LOCAL: u16 = 1;
/// An endpoint of another node, by its `nodeName`: never delivered here whatever the routes say.
pub const SLOT_REMOTE: u16 = 2;

/// An endpoint, by value.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Slot<A> {
    pub address: A,
    pub port: Port,
    /// [`SLOT_LOCAL`], [`SLOT_REMOTE`].
    pub flags: u16,
    pub zero: u32,
}

/// Key of `tp_removed_eps`: an endpoint that takes no more new flows of a Service port; of others
/// it may.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct EndpointKey {
    pub address: WideAddress,
    pub port: Port,
    pub protocol: u8,
    pub ipv6: u8,
    /// Index of the Service port.
    pub service: u32,
}
