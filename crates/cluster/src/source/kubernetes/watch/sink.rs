//! The destination of what the watches of one source read.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use tokio::sync::{mpsc, watch};

use crate::source::{
    batch::{Batch, Update},
    events::EventRecorder,
    kubernetes::known_versions::KnownVersions,
    status::StatusWriter,
};

/// The Node object of this node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in crate::source::kubernetes) enum OwnNode {
    /// The API server has not been asked yet.
    #[default]
    Unknown,
    Missing,
    /// It has this UID, which is another one when it is made anew.
    Uid(Box<str>),
}

/// The destination of the events of one source's watches.
#[derive(Clone)]
pub(in crate::source::kubernetes) struct Sink {
    pub(in crate::source::kubernetes) sender: mpsc::Sender<Batch>,
    pub(in crate::source::kubernetes) status: StatusWriter,
    pub(in crate::source::kubernetes) events: EventRecorder,
    /// The number of first lists that are still outstanding.
    pub(in crate::source::kubernetes) lists: Arc<AtomicUsize>,
    /// The same as [`crate::source::Kubernetes::relist_within`].
    pub(in crate::source::kubernetes) relist_within: Duration,
    /// This node's Node, which alone is watched by agents.
    pub(in crate::source::kubernetes) own_node: watch::Sender<OwnNode>,
    /// The minimum versions of lists.
    pub(in crate::source::kubernetes) known: KnownVersions,
}

/// The run loop is gone, and watches end.
pub(super) struct Stopped;

impl Sink {
    pub(super) async fn send(&self, update: Update) -> Result<(), Stopped> {
        self.status.sending();
        self.sender.send(Batch(vec![update])).await.map_err(|_| Stopped)
    }

    /// Counts the first list of each kind.
    pub(super) async fn listed(&self) -> Result<(), Stopped> {
        if self.lists.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.send(Update::Synced).await?;
            self.status.synced();
        }
        Ok(())
    }
}
