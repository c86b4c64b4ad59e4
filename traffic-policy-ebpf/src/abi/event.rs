//! Events: refusals and new flows, for `monitor`.

use super::{Port, Ports, WideAddress};

/// One packet or call that was refused, or that created a flow. It is written to the ring
/// `tp_events` while [`RuntimeConfig::monitor_until`][super::RuntimeConfig::monitor_until] lies
/// ahead.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct MonitorEvent {
    /// The time: CLOCK_MONOTONIC nanoseconds, coarse.
    pub time: u64,
    /// The source of the packet as it came; zero where a socket has no source yet.
    pub source: WideAddress,
    pub destination: WideAddress,
    /// The endpoint of a new flow; otherwise zero.
    pub endpoint: WideAddress,
    pub ports: Ports,
    pub endpoint_port: Port,
    pub protocol: u8,
    pub ipv6: u8,
    /// See [`hook`][super::hook].
    pub hook: u32,
    /// The number of the [`Outcome`][crate::outcome::Outcome].
    pub outcome: u32,
    /// The index of the Service port, or [`NO_SERVICE`][super::NO_SERVICE].
    pub service: u32,
    /// The device by which the packet came; 0 for a socket.
    pub ifindex: u32,
    /// The cookie of the socket's network namespace; 0 for a packet.
    pub netns: u64,
    /// Events that this CPU has suppressed since its last one because of the rate limit.
    pub suppressed: u32,
    pub zero: u32,
}

/// The token bucket of events: one element per CPU of `tp_event_limit`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct EventBucket {
    /// The time in CLOCK_MONOTONIC nanoseconds up to which events have been paid for; it runs ahead
    /// of the clock by one burst at most.
    pub paid_until: u64,
    /// Events suppressed since the last one that was written.
    pub suppressed: u64,
}
