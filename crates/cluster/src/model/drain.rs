//! The rule that decides when a node without an endpoint keeps forwarding after a change to policy
//! Local, shared by the data plane and by predictions.

use std::time::Duration;

/// The default of `run --drain`: the time for which nodes without an endpoint keep forwarding,
/// unless the Service's annotation sets another.
pub const DEFAULT_DRAIN: Duration = Duration::from_secs(30);

/// The external policy of a frontend, as a node last applied it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeldPolicy {
    /// Whether the policy is Local.
    pub local: bool,
    /// The end of its drain, in nanoseconds of a clock that never stops; 0: none.
    pub drain_until: u64,
}

/// Returns the time until which a node still forwards new flows. It is set when the policy turns
/// from Cluster to Local on a node without an endpoint, also when the annotation that let the node
/// forward is removed, and is kept while this state lasts. It is never set because the last local
/// endpoint left (Local must not show a node's address), nor for a new Service.
#[must_use]
pub fn drain_until(
    local: bool,
    local_endpoints: usize,
    held: Option<HeldPolicy>,
    drain: Duration,
    now: u64,
) -> u64 {
    if !local || local_endpoints > 0 {
        return 0;
    }
    match held {
        None => 0,
        Some(held) if held.local => held.drain_until,
        Some(_) if drain.is_zero() => 0,
        Some(_) => now.saturating_add(u64::try_from(drain.as_nanos()).unwrap_or(u64::MAX)),
    }
}
