//! The trace of a packet's steps, written by a copy of the programs for `explain`.

use super::{Port, WideAddress};

/// The number of notes that one packet may leave.
pub const TRACE_STEPS: usize = 32;

/// Kinds of [`TraceStep`]; each constant documents the contents of `value` and `words`.
pub mod step {
    /// The bit arrays were checked. `value`: see [`super::FilterMatch`].
    pub const FILTER: u32 = 1;
    /// A frontend was found. `value`: index of the Service port. `words[0]`: flags.
    pub const FRONTEND: u32 = 2;
    /// No frontend was found. `value`: number of the outcome with the reason.
    pub const NO_FRONTEND: u32 = 3;
    /// The source ranges were checked. `value`: see [`super::RangeMatch`].
    pub const SOURCE_RANGE: u32 = 4;
    /// A list was chosen. `value`: see [`super::ListKind`]. `words`: base and length in
    /// `tp_endpoints`.
    pub const LIST: u32 = 5;
    /// The affinity was looked up. `value`: see [`super::AffinityMatch`].
    pub const AFFINITY: u32 = 6;
    /// An endpoint was chosen. `value`: its index in `tp_endpoints`. `words[0]`: 1 if a Maglev
    /// table chose it.
    pub const SLOT: u32 = 7;
    /// The route of the endpoint. `value`: see [`super::RouteKind`]. `words`: those of the
    /// [`WideAddress`][crate::abi::WideAddress] of the source towards it.
    pub const ROUTE: u32 = 8;
    /// A source port was claimed. `value`: the port, host order.
    pub const PORT: u32 = 9;
    /// The last step. `value`: number of the outcome. `words[0]`: the hook.
    pub const OUTCOME: u32 = 10;
    /// A socket in a pod connects to a loopback address, which is the pod's own.
    pub const OWN_LOOPBACK: u32 = 11;
}

/// Declares what the `value` of a step means, numbered from 0.
macro_rules! value {
    ($(#[$doc:meta])* $name:ident { $($(#[$of:meta])* $variant:ident,)+ }) => {
        $(#[$doc])*
        #[repr(u32)]
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum $name { $($(#[$of])* $variant,)+ }

        impl $name {
            /// Returns the meaning of a step's `value`; `None` for a number that no program notes.
            #[must_use]
            pub fn numbered(value: u32) -> Option<Self> {
                [$(Self::$variant),+].get(value as usize).copied()
            }
        }
    };
}

value! {
    /// The result of the prefilter for a packet or a call, as [`step::FILTER`] notes it.
    FilterMatch {
        /// No bit is set.
        No,
        /// The packet may be a reply: its port is one of the SNAT port range, at an address that
        /// may be this node's.
        SnatPort,
        /// The packet may be for an address of this node, and a frontend there has its port.
        NodePort,
        /// The packet's destination may be a ClusterIP, or the address of another frontend that is
        /// not on this node's addresses.
        Service,
    }
}

value! {
    /// Whether a client is within the source ranges of a frontend, as [`step::SOURCE_RANGE`] notes
    /// it.
    RangeMatch {
        Outside,
        Within,
    }
}

impl RangeMatch {
    #[inline(always)]
    pub const fn of(within: bool) -> Self {
        if within { Self::Within } else { Self::Outside }
    }
}

value! {
    /// The list of endpoints in effect, with the reason, as [`step::LIST`] notes it.
    ListKind {
        /// The policy is Cluster.
        Cluster,
        /// The policy is Local, and this node has endpoints.
        Local,
        /// The policy became Local recently; load balancers may not have noticed yet.
        Draining,
        /// The policy is Local, but for clients outside the node only.
        Internal,
        /// The policy is Local, and no endpoint takes connections anywhere.
        NoneAnywhere,
        /// The policy is Local, and the endpoints are on other nodes.
        NoneHere,
    }
}

value! {
    /// Whether a client has an endpoint by its affinity, as [`step::AFFINITY`] notes it.
    AffinityMatch {
        /// The client has none in the list, and gets one now.
        New,
        /// The client keeps the one that it has.
        Kept,
    }
}

impl AffinityMatch {
    #[inline(always)]
    pub const fn of(kept: bool) -> Self {
        if kept { Self::Kept } else { Self::New }
    }
}

value! {
    /// The route to an endpoint, as [`step::ROUTE`] notes it.
    RouteKind {
        /// The endpoint is on this node.
        Local,
        /// A known next hop leads there.
        NextHop,
        /// A neighbour leads there that is not resolved yet.
        Unresolved,
        /// No route can be used.
        None,
    }
}

// The packet path adds whether the neighbour is unresolved.
const _: () = assert!(RouteKind::NextHop as u32 + 1 == RouteKind::Unresolved as u32);

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
