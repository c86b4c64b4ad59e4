//! Periods of the run loop.

use std::time::Duration;

/// Intervals and delays of the loop.
#[derive(Clone, Copy, Debug)]
pub(super) struct Timing {
    /// Changes within this time are written together; the first one is written at once. For long
    /// lists the delay is longer: see [`traffic_policy_dataplane::ServiceMaps::pause`].
    pub debounce: Duration,
    /// Interval between periodic sweeps.
    pub sweep: Duration,
    /// Interval of checks whether a flow has found no room.
    pub room: Duration,
    /// Interval of checks of failures, next hops and the fingerprint of routes.
    pub maintenance: Duration,
    /// Interval of checks of the source ports that sockets hold.
    pub snat_ports: Duration,
    /// Delay before a failed write is tried again.
    pub retry: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            debounce: Duration::from_millis(50),
            sweep: Duration::from_secs(2),
            room: Duration::from_millis(250),
            maintenance: Duration::from_secs(5),
            snat_ports: Duration::from_secs(30),
            retry: Duration::from_secs(5),
        }
    }
}
