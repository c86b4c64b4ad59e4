//! The agent's heartbeat, read by `status` while the agent runs or after it has stopped.

use super::WideAddress;

/// One element of `tp_heartbeat`. Programs read [`Self::hz`], [`Self::jiffies`]. Times are
/// CLOCK_MONOTONIC nanoseconds.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct AgentHeartbeat {
    /// The time when the agent had loaded its programs; 0 = it has not, or never ran.
    pub started: u64,
    /// The time of the agent's last heartbeat.
    pub seen: u64,
    /// The low half of jiffies at [`Self::seen`].
    pub jiffies: u32,
    /// Jiffies per second.
    pub hz: u32,
    /// The time since which the maps have held the whole desired state of the last sync; 0 = never.
    pub synced: u64,
    /// The time since which a write has been failing; 0 = none is.
    pub failing: u64,
    /// The address at which the agent serves `/healthz` and `/status`; zero = not known.
    pub address: WideAddress,
    /// The port, in host order.
    pub port: u32,
    pub ipv6: u32,
    /// The process number of the agent, in its own PID namespace.
    pub pid: u32,
    pub zero: u32,
}
