//! Periods of the run loop.

use std::time::Duration;

/// Intervals and delays of the loop.
#[derive(Clone, Copy, Debug)]
pub(super) struct Timing {
    /// Changes that come within this time are written together; the first one is written at once. Where long lists change it is
    /// longer: see [`super::PacketPath::pause`].
    pub debounce: Duration,
    /// Between periodic sweeps.
    pub sweep: Duration,
    /// Between looks at whether a flow has found no room.
    pub room: Duration,
    /// Between looks at what failed, at next hops and at the fingerprint of routes.
    pub maintenance: Duration,
    /// Between looks at the source ports that sockets hold.
    pub snat_ports: Duration,
    /// A failed write is tried again after this time.
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
