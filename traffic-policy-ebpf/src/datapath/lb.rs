//! Types of load balancing: the target, the client, and the list of endpoints that may serve it.

pub mod affinity;
pub mod maglev;
pub mod owners;
pub mod pod_stack;
pub mod select;

use traffic_policy_ebpf::{
    abi::{Address, Frontend, IndexRange, Port, Tuple, scope},
    outcome::Outcome,
};

/// The destination of a packet or call, as a key for frontends.
#[derive(Clone, Copy)]
pub struct Target<A> {
    pub address: A,
    pub port: Port,
    pub protocol: u16,
    /// See [`scope`].
    pub scope: u32,
}

/// The source of a packet or call.
#[derive(Clone, Copy)]
pub struct Client<A> {
    /// The address that is compared with source ranges.
    pub source: A,
    /// The cookie of the network namespace of a process of this node or of its pods. Affinity
    /// identifies the client by it, and the external policy does not apply to it. 0: a packet from
    /// outside.
    pub netns: u64,
    /// Whether it is a packet of a pod of this node: the external policy does not apply to it
    /// either.
    pub of_pod: bool,
    /// A hash that spreads clients over endpoints.
    pub hash: u64,
}

/// The reason why there is no endpoint, and the Service that refused.
#[derive(Clone, Copy)]
pub struct Refusal {
    pub outcome: Outcome,
    /// The index of the Service port, or [`NO_SERVICE`][traffic_policy_ebpf::abi::NO_SERVICE].
    pub service: u32,
}

/// The list in effect for a client.
pub struct List {
    pub frontend: *const Frontend,
    pub service: u32,
    pub range: IndexRange,
    /// Whether it is the list of policy Local.
    pub local: bool,
}

impl<A: Address> Target<A> {
    /// The target of a packet.
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
