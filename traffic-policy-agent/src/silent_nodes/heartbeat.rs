//! Heartbeats of the Node objects of dead nodes: a node that has none for long may be dead for
//! others, too; one whose kubelet goes on reports that it is not, even if it cannot be asked.
//!
//! Times of other clocks are compared with each other alone: a heartbeat counts if it differs from
//! the first that was read after the node was left out.

use std::{
    hash::{DefaultHasher, Hash as _, Hasher as _},
    time::{Duration, Instant},
};

use traffic_policy_cluster::source::Heartbeat;

/// The time after a death at which the Node is read first: by then, Kubernetes has removed the
/// endpoints of a node that is dead for all.
const FIRST: Duration = Duration::from_secs(60);
/// The longest time between two looks; each is twice the one before.
const LAST: Duration = Duration::from_secs(600);

/// The looks at one Node.
#[derive(Debug)]
pub(super) struct Looks {
    due: Instant,
    pause: Duration,
    first: Option<String>,
}

impl Looks {
    /// Begins with a death. `salt` spreads the looks of all nodes at one Node.
    pub(super) fn begin(salt: &str, now: Instant) -> Self {
        let mut hasher = DefaultHasher::new();
        salt.hash(&mut hasher);
        let late = Duration::from_millis(hasher.finish() % FIRST.as_millis() as u64);
        Self { due: now + FIRST + late, pause: FIRST, first: None }
    }

    /// Whether it is time for a look, which is then taken to be under way.
    pub(super) fn are_due(&mut self, now: Instant) -> bool {
        let due = now >= self.due;
        if due {
            self.pause = (self.pause * 2).min(LAST);
            self.due = now + self.pause;
        }
        due
    }

    /// Takes what was read. Returns whether the kubelet has gone on since the death.
    pub(super) fn see(&mut self, heartbeat: Heartbeat) -> bool {
        match &self.first {
            None => {
                self.first = Some(heartbeat.at);
                false
            }
            Some(first) if heartbeat.ready && *first != heartbeat.at => {
                self.first = Some(heartbeat.at);
                true
            }
            Some(_) => false,
        }
    }
}
