//! Types of load balancing: target, client, and the list of endpoints that may serve it.

pub mod affinity;
pub mod select;

use traffic_policy_ebpf::{
    abi::{Address, Frontend, IndexRange, Port, Tuple, scope},
    outcome::Outcome,
};

/// Destination of a packet or call, as frontends are looked up.
#[derive(Clone, Copy)]
pub struct Target<A> {
    pub address: A,
    pub port: Port,
    pub protocol: u16,
    /// See [`scope`].
    pub scope: u32,
}

/// Source of a packet or call.
#[derive(Clone, Copy)]
pub struct Client<A> {
    /// Compared with source ranges.
    pub source: A,
    /// A process of this node or of its pods: the cookie of its network namespace, by which
    /// affinity knows it, and the external policy is not for it. 0: a packet from outside.
    pub netns: u64,
    /// Spreads clients over endpoints.
    pub hash: u64,
}

/// Why there is no endpoint, and whose Service said so.
#[derive(Clone, Copy)]
pub struct Refusal {
    pub outcome: Outcome,
    /// Index of the Service port, or [`NO_SERVICE`][traffic_policy_ebpf::abi::NO_SERVICE].
    pub service: u32,
}

/// The list that holds for a client.
pub struct List {
    pub frontend: *const Frontend,
    pub service: u32,
    pub range: IndexRange,
    /// The list of policy Local.
    pub local: bool,
}

impl<A: Address> Target<A> {
    /// Destination of a packet.
    #[inline(always)]
    pub fn of(tuple: &Tuple<A>) -> Self {
        Self {
            address: tuple.destination,
            port: tuple.ports.destination(),
            protocol: tuple.protocol as u16,
            scope: scope::ADDRESS,
        }
    }
}
