//! Sweeps within the run loop: in pieces, between everything else.

use std::time::Duration;

use tokio::time::Instant;
use traffic_policy_dataplane::FlowSweeps;

/// Length of a piece of a sweep; [`SWEEP_AGAIN`] is the pause after it.
const SWEEP_FOR: Duration = Duration::from_micros(500);
const SWEEP_AGAIN: Duration = Duration::from_millis(1);

/// The pace of a sweep.
pub(super) struct SweepPacer {
    next_piece: Instant,
}

impl SweepPacer {
    pub(super) fn new() -> Self {
        Self { next_piece: Instant::now() }
    }

    /// Returns the time at which sweeping continues, if there is something to sweep.
    pub(super) fn next_piece(&self) -> Instant {
        self.next_piece
    }

    /// Sweeps for a moment, and then yields the CPU, which may be the only one available. Returns
    /// whether a periodic sweep has ended.
    pub(super) fn sweep_on(&mut self, path: &mut impl FlowSweeps) -> bool {
        let start = Instant::now();
        let mut ended = false;
        while path.is_sweeping() && start.elapsed() < SWEEP_FOR {
            match path.sweep_on() {
                Ok(end) => ended |= end,
                Err(error) => tracing::warn!("sweeping old flows failed: {error:#}"),
            }
        }
        self.next_piece = Instant::now() + SWEEP_AGAIN;
        ended
    }
}
