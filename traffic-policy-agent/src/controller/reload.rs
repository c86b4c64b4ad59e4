//! Settings that the run loop takes over while it runs.

use std::future::pending;

use tokio::sync::{mpsc, oneshot};
use traffic_policy_dataplane::IdleTimes;

use super::NodePortAddresses;

/// The settings that can change at run time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Live {
    pub idle: IdleTimes,
    pub node_port_addresses: NodePortAddresses,
}

/// Settings to be taken over, with a channel for the acknowledgement.
#[derive(Debug)]
pub struct Reload {
    pub live: Live,
    done: oneshot::Sender<()>,
}

impl Reload {
    /// Makes a reload, with the receiver of its acknowledgement.
    #[must_use]
    pub fn new(live: Live) -> (Self, oneshot::Receiver<()>) {
        let (done, heard) = oneshot::channel();
        (Self { live, done }, heard)
    }

    pub(super) fn done(self) {
        // The send fails only if the receiver has been dropped.
        let _ = self.done.send(());
    }
}

/// Receiver of reloads.
#[derive(Debug)]
pub struct Reloads(mpsc::Receiver<Reload>);

impl Reloads {
    #[must_use]
    pub fn channel() -> (mpsc::Sender<Reload>, Self) {
        let (sender, receiver) = mpsc::channel(1);
        (sender, Self(receiver))
    }

    /// Returns the next reload; never returns if all senders are gone. Cancel-safe.
    pub(super) async fn next(&mut self) -> Reload {
        match self.0.recv().await {
            Some(reload) => reload,
            None => pending().await,
        }
    }
}
