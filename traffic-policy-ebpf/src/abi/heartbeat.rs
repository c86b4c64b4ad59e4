//! The agent's heartbeat, read by `status` while the agent runs or after it ended.

use super::WideAddress;

/// One element of `tp_heartbeat`. Programs read [`Self::hz`], [`Self::jiffies`]. Times are
/// CLOCK_MONOTONIC nanoseconds.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct AgentHeartbeat {
    /// When it had loaded its programs; 0 = it has not, or never ran.
    pub started: u64,
    /// Its last sign of life.
    pub seen: u64,
    /// Low half of jiffies at [`Self::seen`].
    pub jiffies: u32,
    /// Jiffies per second.
    pub hz: u32,
    /// Since when the maps have held all that was desired at the last sync; 0 = never.
    pub synced: u64,
    /// Since when a write has been failing; 0 = none is.
    pub failing: u64,
    /// Address at which it answers `/healthz` and `/status`; zero = not known.
    pub address: WideAddress,
    /// Host order.
    pub port: u32,
    pub ipv6: u32,
    /// Its process, in its own PID namespace.
    pub pid: u32,
    pub zero: u32,
}
