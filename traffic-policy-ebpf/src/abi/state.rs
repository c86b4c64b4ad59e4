//! Words of the agent for the packet path, and of the packet path for the agent.

/// Words that the agent writes and the packet path reads: one cache line, not written per packet.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct State {
    /// Route epoch in the lower half (never 0), hop generation (0 or 1) in the upper. Raised when a stored route may be wrong.
    pub route: u32,
    /// Raised when a stored MAC may be wrong.
    pub hop_epoch: u32,
    /// Jiffies after which a hop is resolved again.
    pub hop_max_age: u32,
    /// Number of ports in `tp_snat_ports`.
    pub pool_len: u32,
    /// New flows are put in `tp_pending` while this many in the main table are not assured.
    pub unassured_limit: [u32; 2],
    /// Seed of the flow hash.
    pub seed: u64,
    /// [`Usage::snat_created`] at the start of the last sweep that found no flow with SNAT.
    pub snat_swept: u64,
    /// [`Usage::pending_created`] at the start of the last sweep that found `tp_pending` empty.
    pub pending_swept: u64,
    /// Answers that one CPU may make per jiffy, on average.
    pub answers_per_jiffy: u32,
    /// Fingerprint of the routes and rules under which the epoch was raised last, so that an agent that takes over can
    /// tell whether they changed while nobody watched.
    pub network: u32,
    /// CLOCK_MONOTONIC nanoseconds until which somebody reads `tp_events`; 0 = nobody does.
    pub monitor_until: u64,
}

/// Words that the packet path writes for new flows, in cache lines of their own.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Usage {
    /// Flows with SNAT ever created.
    pub snat_created: u64,
    /// Flows ever put into `tp_pending`.
    pub pending_created: u64,
    /// TCP flows in the main tables that are not assured: IPv4, IPv6.
    pub unassured: [u64; 2],
    /// Hops handed out in each generation.
    pub hops: [u64; 2],
    /// UDP flows in the main tables that are not assured: IPv4, IPv6.
    pub unassured_udp: [u64; 2],
    /// Where the packet path looks next in `tp_flow_dir4` and `tp_flow_dir6` for flows that are over.
    pub hand: [u64; 2],
    /// Low half of jiffies when an entry found no room in a main table last.
    pub full_at: u32,
    /// The same when this node itself sent a datagram from a frontend's address and port last.
    pub own_datagram_at: u32,
    pub zero: [u32; 10],
}
