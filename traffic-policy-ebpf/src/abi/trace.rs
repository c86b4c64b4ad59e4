//! The trace of a packet's steps, written by a copy of the programs for `explain`.

use super::{Port, WideAddress};

/// The number of notes that one packet may leave.
pub const TRACE_STEPS: usize = 32;

/// Kinds of [`TraceStep`]; each constant documents the contents of `value` and `words`.
pub mod step {
    /// The bit arrays were checked. `value`: 0 no bit, 1 the port of a pool, 2 the port of a
    /// frontend, 3 the address of a Service.
    pub const FILTER: u32 = 1;
    /// A frontend was found. `value`: index of the Service port. `words[0]`: flags.
    pub const FRONTEND: u32 = 2;
    /// No frontend was found. `value`: number of the outcome with the reason.
    pub const NO_FRONTEND: u32 = 3;
    /// The source ranges were checked. `value`: 1 within, 0 not.
    pub const SOURCE_RANGE: u32 = 4;
    /// A list was chosen. `value`: see [`super::list`]. `words`: base and length in `tp_endpoints`.
    pub const LIST: u32 = 5;
    /// The affinity was looked up. `value`: 1 the client has an endpoint in the list, 0 not.
    pub const AFFINITY: u32 = 6;
    /// An endpoint was chosen. `value`: its index in `tp_endpoints`.
    pub const SLOT: u32 = 7;
    /// The route of the endpoint. `value`: 0 on this node, 1 by a next hop, 2 by a neighbour not
    /// resolved yet, 3 none. `words`: those of the [`WideAddress`][crate::abi::WideAddress] of the
    /// source towards it.
    pub const ROUTE: u32 = 8;
    /// A source port was claimed. `value`: the port, host order.
    pub const PORT: u32 = 9;
    /// A socket in a pod connects to a loopback address, which is the pod's own.
    pub const OWN_LOOPBACK: u32 = 11;
    /// The last step. `value`: number of the outcome. `words[0]`: the hook.
    pub const OUTCOME: u32 = 10;
}

/// The list of endpoints in effect, with the reason.
pub mod list {
    /// The policy is Cluster.
    pub const CLUSTER: u32 = 0;
    /// The policy is Local, and this node has endpoints.
    pub const LOCAL: u32 = 1;
    /// The policy became Local recently; load balancers may not have noticed yet.
    pub const DRAINING: u32 = 2;
    /// The policy is Local, but for clients outside the node only.
    pub const INTERNAL: u32 = 3;
    /// The policy is Local, and no endpoint takes connections anywhere.
    pub const NONE_ANYWHERE: u32 = 4;
    /// The policy is Local, and the endpoints are on other nodes.
    pub const NONE_HERE: u32 = 5;
}

/// One step of a packet's path.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct TraceStep {
    /// See [`step`].
    pub kind: u32,
    pub value: u32,
    pub words: [u64; 2],
}

/// All notes of one packet: one element of `tp_trace`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct PacketTrace {
    /// The number of notes made, including those that found no room.
    pub count: u32,
    pub zero: u32,
    pub steps: [TraceStep; TRACE_STEPS],
}

/// A socket call that a traced copy evaluates: the kernel runs no socket program for a test. One
/// element of `tp_explain_call`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct SocketQuestion {
    pub destination: WideAddress,
    /// The bound source address; zero if the socket is not bound.
    pub source: WideAddress,
    /// The cookie of the socket's network namespace; not 0.
    pub netns: u64,
    /// A hash that spreads clients over endpoints.
    pub hash: u64,
    pub port: Port,
    pub protocol: u16,
    /// 1: the socket is in the node's own network namespace.
    pub node: u16,
    pub ipv6: u16,
}
