//! Configuration of the packet path that changes while the agent runs.

/// Words that the agent writes and the packet path reads: one cache line, not written per packet.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct RuntimeConfig {
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
    /// The SYNs to a node's endpoints that have to remain unanswered before it is suspected; 0: no
    /// node is.
    pub suspect_syns: u32,
    /// The jiffies for which they have to.
    pub suspect_after: u32,
    /// 1: `--local-delivery direct`. Only commands read it.
    pub local_delivery: u32,
    /// The setting that the agent has changed for that in this network namespace, and `cleanup`
    /// sets back. 1: `nf_conntrack_tcp_be_liberal` was 0.
    pub conntrack_was_strict: u32,
    /// The seconds that `nf_conntrack_tcp_timeout_unacknowledged` had; 0: it was left as it is.
    pub conntrack_unacknowledged: u32,
    /// 1: `--pod-services on`. Only commands read it.
    pub pod_services: u32,
    /// The device in which the kernel divides aggregates of SCTP packets that are to go back
    /// through the node in front (`--forwarding tunnel`); 0: there is none.
    pub sctp_divider: u32,
    /// Its peer, where the packets arrive, on their way out.
    pub sctp_divided: u32,
}
