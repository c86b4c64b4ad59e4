//! SIGTERM and SIGINT.

use anyhow::{Context as _, Result};
use tokio::signal::unix::{Signal, SignalKind, signal};

/// Receiver of both signals.
pub(super) struct Stop([Signal; 2]);

impl Stop {
    pub(super) fn listen() -> Result<Self> {
        let terminate = signal(SignalKind::terminate()).context("SIGTERM cannot be waited for")?;
        let interrupt = signal(SignalKind::interrupt()).context("SIGINT cannot be waited for")?;
        Ok(Self([terminate, interrupt]))
    }

    /// Waits for one of the signals; returns at once if one has arrived. Cancel-safe.
    pub(super) async fn requested(&mut self) {
        let [terminate, interrupt] = &mut self.0;
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    }
}
