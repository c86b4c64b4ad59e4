//! Sweeps within the run loop: in pieces, between everything else.

use std::time::Duration;

use tokio::time::{Instant, sleep_until};

use super::{Controller, PacketPath};

/// A sweep goes on for so long, and again after so long.
const SWEEP_FOR: Duration = Duration::from_micros(500);
const SWEEP_AGAIN: Duration = Duration::from_millis(1);

impl<P: PacketPath> Controller<P> {
    /// Sweeps for a moment, and then lets others have the CPU, which may be the only one that they can have.
    pub(super) fn sweep_on(&mut self) {
        let start = Instant::now();
        while self.dataplane.is_sweeping() && start.elapsed() < SWEEP_FOR {
            match self.dataplane.sweep_on() {
                Ok(true) if self.synced_once => self.observe(),
                Ok(_) => {}
                Err(error) => tracing::warn!("sweeping old flows failed: {error:#}"),
            }
        }
        self.next_piece = Instant::now() + SWEEP_AGAIN;
    }

    /// Waits, but for what is to be swept meanwhile.
    pub(super) async fn sweep_until(&mut self, end: Instant) {
        while Instant::now() < end {
            if self.dataplane.is_sweeping() {
                sleep_until(end.min(self.next_piece)).await;
                self.sweep_on();
            } else {
                sleep_until(end).await;
            }
        }
    }
}
