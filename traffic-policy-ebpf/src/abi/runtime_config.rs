//! Configuration of the packet path that changes while the agent runs.

/// Words that the agent writes and the packet path reads: one cache line, not written per packet.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct RuntimeConfig {
    /// The route epoch in the lower half (never 0), the hop generation (0 or 1) in the upper. It is
    /// raised when a stored route may be wrong.
    pub route: u32,
    /// The hop epoch, raised when a stored MAC may be wrong.
    pub hop_epoch: u32,
    /// The jiffies after which a hop is resolved again.
    pub hop_max_age: u32,
    /// The number of ports in `tp_snat_ports`.
    pub snat_port_count: u32,
    /// The seed of the flow hash.
    pub seed: u64,
    /// The answers that one CPU may send per jiffy, on average.
    pub answers_per_jiffy: u32,
    /// A fingerprint of the routes and rules under which the epoch was raised last. An agent that
    /// takes over can tell by it whether they changed while no agent was running.
    pub network: u32,
    /// The time in CLOCK_MONOTONIC nanoseconds until which `tp_events` has a reader; 0 = it has
    /// none.
    pub monitor_until: u64,
    /// The families of which some route names an MTU (`tp_route_mtus4`, `tp_route_mtus6`), as bits:
    /// 1 for IPv4 and 2 for IPv6.
    pub route_mtus: u32,
}
