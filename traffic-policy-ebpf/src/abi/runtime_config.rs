//! Configuration of the packet path, as it changes while the agent runs.

/// Words that the agent writes and the packet path reads: one cache line, not written per packet.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct RuntimeConfig {
    /// Route epoch in the lower half (never 0), hop generation (0 or 1) in the upper. Raised when a
    /// stored route may be wrong.
    pub route: u32,
    /// Raised when a stored MAC may be wrong.
    pub hop_epoch: u32,
    /// Jiffies after which a hop is resolved again.
    pub hop_max_age: u32,
    /// Number of ports in `tp_snat_ports`.
    pub pool_len: u32,
    /// Seed of the flow hash.
    pub seed: u64,
    /// Answers that one CPU may make per jiffy, on average.
    pub answers_per_jiffy: u32,
    /// Fingerprint of the routes and rules under which the epoch was raised last, so that an agent
    /// that takes over can tell whether they changed while nobody watched.
    pub network: u32,
    /// CLOCK_MONOTONIC nanoseconds until which `tp_events` has a reader; 0 = it has none.
    pub monitor_until: u64,
    /// Bits of the families, 1 for IPv4 and 2 for IPv6, of which some route names an MTU:
    /// `tp_route_mtus4`, `tp_route_mtus6`.
    pub route_mtus: u32,
}
