//! The trace of a packet's steps, written by a copy of the programs for `explain`.

use super::{Port, WideAddress};

/// Notes that one packet may leave.
pub const TRACE_STEPS: usize = 32;

/// Kinds of [`TraceStep`]. Each says what `value` and `words` hold.
pub mod step {
    /// Bit arrays asked. `value`: 0 no bit, 1 the port of a pool, 2 the port of a frontend, 3 the
    /// address of a Service.
    pub const FILTER: u32 = 1;
    /// Frontend found. `value`: index of the Service port. `words[0]`: flags.
    pub const FRONTEND: u32 = 2;
    /// No frontend. `value`: number of the outcome that says why.
    pub const NO_FRONTEND: u32 = 3;
    /// Source ranges asked. `value`: 1 within, 0 not.
    pub const SOURCE_RANGE: u32 = 4;
    /// A list chosen. `value`: see [`super::list`]. `words`: base and length in `tp_endpoints`.
    pub const LIST: u32 = 5;
    /// Affinity asked. `value`: 1 the client has an endpoint in the list, 0 not.
    pub const AFFINITY: u32 = 6;
    /// An endpoint chosen. `value`: its index in `tp_endpoints`.
    pub const SLOT: u32 = 7;
    /// Its route. `value`: 0 on this node, 1 by a next hop, 2 by a neighbour not resolved yet, 3
    /// none. `words`: those of the [`WideAddress`][crate::abi::WideAddress] of the source towards
    /// it.
    pub const ROUTE: u32 = 8;
    /// A source port claimed. `value`: the port, host order.
    pub const PORT: u32 = 9;
    /// A socket in a pod names a loopback address, which is the pod's own.
    pub const OWN_LOOPBACK: u32 = 11;
    /// The end. `value`: number of the outcome. `words[0]`: the hook.
    pub const OUTCOME: u32 = 10;
}

/// Which list of endpoints holds, and why.
pub mod list {
    /// The policy is Cluster.
    pub const CLUSTER: u32 = 0;
    /// The policy is Local, and there are endpoints here.
    pub const LOCAL: u32 = 1;
    /// The policy turned Local a while ago; load balancers may not have noticed yet.
    pub const DRAINING: u32 = 2;
    /// The policy is Local, but for clients outside the node only.
    pub const INTERNAL: u32 = 3;
    /// The policy is Local, and no endpoint takes connections anywhere.
    pub const NONE_ANYWHERE: u32 = 4;
    /// The policy is Local, and the endpoints are elsewhere.
    pub const NONE_HERE: u32 = 5;
}

/// One step of a packet's way.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct TraceStep {
    /// See [`step`].
    pub kind: u32,
    pub value: u32,
    pub words: [u64; 2],
}

/// All notes of one packet. One element of `tp_trace`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct PacketTrace {
    /// Notes made, those that found no room included.
    pub count: u32,
    pub zero: u32,
    pub steps: [TraceStep; TRACE_STEPS],
}

/// A call of a socket that a traced copy is asked about: the kernel runs no socket program for a
/// test. One element of `tp_explain_call`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct SocketQuestion {
    pub destination: WideAddress,
    /// Zero if the socket is not bound.
    pub source: WideAddress,
    /// Cookie of the socket's network namespace; not 0.
    pub netns: u64,
    /// Spreads clients over endpoints.
    pub hash: u64,
    pub port: Port,
    pub protocol: u16,
    /// 1: in the node's own network namespace.
    pub node: u16,
    pub ipv6: u16,
}
