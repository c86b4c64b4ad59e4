//! Batches of changed objects, and the started source that sends them.

use std::sync::Arc;

use tokio::{
    sync::{Notify, mpsc},
    task::JoinSet,
};

use super::{
    events::EventRecorder,
    kubernetes::condition::{Standing, StandingSender},
    status::StatusReader,
};
use crate::model::{
    Index, Indexed, Policy, ServiceName,
    object::{EndpointSlice, Node, Service, ServiceCidr},
};

/// Change of an object of one kind.
#[derive(Debug)]
pub enum Change<T> {
    Apply(T),
    Delete(ServiceName),
    /// All objects of the kind, after a list. `unreadable` ones exist too, and stay as they were last understood.
    Reset {
        objects: Vec<T>,
        unreadable: Vec<ServiceName>,
    },
}

#[derive(Debug)]
pub enum Update {
    Service(Change<Service>),
    EndpointSlice(Change<EndpointSlice>),
    Node(Change<Node>),
    ServiceCidr(Change<ServiceCidr>),
    /// Everything has been given: what is known is whole.
    Synced,
}

/// Updates that belong together: all of them are applied before anything is written.
#[derive(Debug)]
pub struct Batch(pub Vec<Update>);

impl Batch {
    /// As if every Service had this external policy.
    pub fn set_external_policy(&mut self, policy: Policy) {
        for update in &mut self.0 {
            if let Update::Service(Change::Reset { objects, .. }) = update {
                objects.iter_mut().for_each(|service| service.external_policy = policy);
            }
        }
    }

    /// Puts the updates into the index. Returns whether anything changed that may have to be written.
    pub fn apply(self, index: &mut Index) -> bool {
        let mut changed = false;
        for update in self.0 {
            changed |= match update {
                Update::Service(change) => change.apply(index),
                Update::EndpointSlice(change) => change.apply(index),
                Update::Node(change) => change.apply(index),
                Update::ServiceCidr(change) => change.apply(index),
                Update::Synced => {
                    let first = !index.is_synced();
                    index.set_synced();
                    first
                }
            };
        }
        changed
    }
}

impl<T: Indexed> Change<T> {
    fn apply(self, index: &mut Index) -> bool {
        match self {
            Self::Apply(object) => index.apply(object),
            Self::Delete(name) => index.delete::<T>(&name),
            Self::Reset { objects, unreadable } => index.reset(objects, &unreadable),
        }
    }
}

/// A started source. Dropping it stops its tasks.
#[derive(Debug)]
pub struct Source {
    pub(super) updates: mpsc::Receiver<Batch>,
    pub(super) status: StatusReader,
    pub(super) events: EventRecorder,
    /// The maps hold what the source has given.
    pub(super) filled: Arc<Notify>,
    /// Status of the agent, for the condition on its Node.
    pub(super) standing: Option<StandingSender>,
    pub(super) tasks: JoinSet<()>,
}

/// Enough that a source need not wait for the run loop while that writes one change.
pub(super) const QUEUE: usize = 1024;

impl Source {
    /// Waits for the next batch. Cancel-safe. `None` when a part of the source has stopped, which it does by itself
    /// only by a panic: then changes may be missed, and the agent must start anew.
    pub async fn next(&mut self) -> Option<Batch> {
        tokio::select! {
            biased;
            batch = self.updates.recv() => batch.inspect(|_| self.status.taken()),
            Some(_) = self.tasks.join_next() => None,
        }
    }

    /// The next batch, if one is already there: lets the run loop take many changes with one write.
    pub fn try_next(&mut self) -> Option<Batch> {
        self.updates.try_recv().ok().inspect(|_| self.status.taken())
    }

    /// Status of the source, for `status` and for metrics. Cheap to clone.
    #[must_use]
    pub fn status(&self) -> StatusReader {
        self.status.clone()
    }

    /// Says that the maps hold all that the source has given, for the first time.
    pub fn filled(&self) {
        self.filled.notify_one();
    }

    /// Says how the agent fares: what keeps it from being ready, if anything.
    pub fn report(&self, wrong: &[&str]) {
        if let Some(standing) = &self.standing {
            let new = Standing { wrong: wrong.join("; ") };
            standing.send_if_modified(|old| {
                let differs = old.as_ref() != Some(&new);
                *old = Some(new);
                differs
            });
        }
    }

    /// Recorder that posts Events; with manifests they are only logged.
    #[must_use]
    pub fn events(&self) -> EventRecorder {
        self.events.clone()
    }
}
