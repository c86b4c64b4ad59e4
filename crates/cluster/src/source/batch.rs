//! Batches of changed objects, and the running source that sends them.

use std::sync::Arc;

use tokio::{
    sync::{Notify, mpsc},
    task::JoinSet,
};

use super::{
    events::EventRecorder,
    kubernetes::condition::{ConditionSender, NodeCondition},
    node_addresses::NodeAddresses,
    status::StatusReader,
};
use crate::model::{
    Index, Indexed, Policy, ServiceName,
    object::{DirectNode, EndpointSlice, LeavingNode, Node, Service, ServiceCidr},
};

/// A change to objects of one kind.
#[derive(Debug)]
pub enum Change<T> {
    Apply(T),
    Delete(ServiceName),
    /// All objects of the kind, after a list. `unreadable` objects exist too, and keep their last
    /// readable state.
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
    Leaving(Change<LeavingNode>),
    Direct(Change<DirectNode>),
    /// All objects have been delivered: the known state is complete.
    Synced,
}

/// Updates that belong together: all of them are applied before anything is written.
#[derive(Debug)]
pub struct Batch(pub Vec<Update>);

impl Batch {
    /// Sets this external policy on every Service.
    pub fn set_external_policy(&mut self, policy: Policy) {
        for update in &mut self.0 {
            if let Update::Service(Change::Reset { objects, .. }) = update {
                objects.iter_mut().for_each(|service| service.external_policy = policy);
            }
        }
    }

    /// Whether all Leases of direct forwarding are in it, after a list.
    #[must_use]
    pub fn has_all_leases(&self) -> bool {
        self.0.iter().any(|update| matches!(update, Update::Direct(Change::Reset { .. })))
    }

    /// Applies the updates to the index. Returns whether anything changed that may have to be
    /// written.
    pub fn apply(self, index: &mut Index) -> bool {
        let mut changed = false;
        for update in self.0 {
            changed |= match update {
                Update::Service(change) => change.apply(index),
                Update::EndpointSlice(change) => change.apply(index),
                Update::Node(change) => change.apply(index),
                Update::ServiceCidr(change) => change.apply(index),
                Update::Leaving(change) => change.apply(index),
                Update::Direct(change) => change.apply(index),
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

/// A running source. Dropping it stops its tasks.
#[derive(Debug)]
pub struct Source {
    pub(super) updates: mpsc::Receiver<Batch>,
    pub(super) status: StatusReader,
    pub(super) events: EventRecorder,
    /// Notified when the maps hold what the source has delivered.
    pub(super) filled: Arc<Notify>,
    /// The status of the agent, for the condition on its Node.
    pub(super) condition: Option<ConditionSender>,
    pub(super) node_addresses: NodeAddresses,
    pub(super) tasks: JoinSet<()>,
}

/// The length of the queue: enough that a source need not wait while the run loop writes one
/// change.
pub(super) const QUEUE: usize = 1024;

impl Source {
    /// Waits for the next batch. Cancel-safe. Returns `None` when a part of the source has stopped,
    /// which happens by itself only after a panic: changes may then be missed, and the agent must
    /// restart.
    pub async fn next(&mut self) -> Option<Batch> {
        tokio::select! {
            biased;
            batch = self.updates.recv() => batch.inspect(|_| self.status.taken()),
            Some(_) = self.tasks.join_next() => None,
        }
    }

    /// Returns the next batch if one is already there, so that the run loop can take many changes
    /// with one write.
    pub fn try_next(&mut self) -> Option<Batch> {
        self.updates.try_recv().ok().inspect(|_| self.status.taken())
    }

    /// Returns a reader of the source's status, for `status` and for metrics. Cheap to clone.
    #[must_use]
    pub fn status(&self) -> StatusReader {
        self.status.clone()
    }

    /// Notes that the maps hold all that the source has delivered, for the first time.
    pub fn filled(&self) {
        self.filled.notify_one();
    }

    /// Reports the agent's state: what keeps it from being ready, if anything.
    pub fn report(&self, wrong: &[&str]) {
        if let Some(condition) = &self.condition {
            let new = NodeCondition { wrong: wrong.join("; ") };
            condition.send_if_modified(|old| {
                let differs = old.as_ref() != Some(&new);
                *old = Some(new);
                differs
            });
        }
    }

    /// Returns the recorder that posts Events; with manifests they are only logged.
    #[must_use]
    pub fn events(&self) -> EventRecorder {
        self.events.clone()
    }

    /// Returns the addresses of nodes that the index does not have.
    #[must_use]
    pub fn node_addresses(&self) -> NodeAddresses {
        self.node_addresses.clone()
    }
}
