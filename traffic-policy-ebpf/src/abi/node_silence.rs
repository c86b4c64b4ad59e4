//! Signs of life of the nodes that endpoints are on, and suspicions that one is dead.

/// The length in bytes of a node's name, zero filled: Kubernetes allows 253 (RFC 1123 subdomain).
pub const NODE_NAME_LENGTH: usize = 256;

/// The first place of `tp_node_silence` that stands for a next hop, for endpoints without a
/// `nodeName`: the index of the hop is added. Places before it are numbers of nodes, from 1.
pub const HOP_PLACES: u32 = 16_384;

/// SYNs to the endpoints of one node, and whether any of them answers: one element of
/// `tp_node_silence`. The packet path writes all but [`Self::dead`], the agent that and a 0 in
/// [`Self::syns`]. Times: low half of jiffies.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct NodeSilence {
    /// The time of the first SYN that came after the last answer.
    pub asked: u32,
    /// The time of the last answer to a SYN.
    pub answered: u32,
    /// [`Self::asked`] when it was last reported to the agent.
    pub reported: u32,
    /// The number of SYNs since [`Self::asked`]; 0: all are answered. It is counted up to
    /// [`RuntimeConfig::suspect_syns`][super::RuntimeConfig::suspect_syns]. The agent sets it to 0
    /// in order to be told again.
    pub syns: u16,
    /// 1: the agent has found that the node is dead.
    pub dead: u16,
}

/// A suspicion that a node is dead: an element of the ring `tp_suspicions`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Suspicion {
    /// The node's place in `tp_node_silence`.
    pub place: u32,
    /// [`NodeSilence::asked`]
    pub asked: u32,
}
