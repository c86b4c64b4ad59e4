//! Direct forwarding: the nodes that send packets within outer packets, and the endpoints for which
//! this node opens them.

use super::{Address, Port};

/// The key of `tp_direct_eps4` and `tp_direct_eps6`: an endpoint on this node.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct DirectEndpointKey<A: Address> {
    pub address: A,
    /// The index of the Service port; [`NO_SERVICE`][super::NO_SERVICE] for the element that every
    /// such address has.
    pub service: u32,
    /// Padding.
    pub zero: u32,
}

/// The value of `tp_direct_eps4` and `tp_direct_eps6`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct DirectEndpoint {
    /// The port of the endpoint; [`Port::NONE`] in the element without a Service port.
    pub port: Port,
    pub zero: u16,
}
