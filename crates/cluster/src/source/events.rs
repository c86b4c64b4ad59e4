//! Kubernetes Events about Services and this node's Node, which `kubectl describe` shows.

mod correlator;

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use k8s_openapi::api::core::v1::ObjectReference;
use kube::{
    Client,
    runtime::events::{Event, EventType, Recorder, Reporter},
};
use tokio::{
    sync::mpsc,
    time::{Instant, sleep_until},
};
use tracing::debug;

use self::correlator::{Correlator, REMEMBERED, WINDOW, note};
use super::chance::random;
use crate::model::ServiceName;

/// An object that has Events.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Subject {
    Service(ServiceName),
    /// The Node that the agent runs on.
    Node,
}

/// An occurrence that concerns an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectEvent {
    pub subject: Subject,
    /// Whether it needs a person's attention.
    pub is_warning: bool,
    /// The reason in one CamelCase word, such as `FailedToStartServiceHealthcheck`.
    pub reason: String,
    /// The attempted action, in one CamelCase word, such as `Listen`.
    pub action: String,
    /// One sentence.
    pub message: String,
}

impl ObjectEvent {
    #[must_use]
    pub fn warning(subject: Subject, reason: &str, action: &str, message: String) -> Self {
        Self { subject, is_warning: true, reason: reason.to_owned(), action: action.to_owned(), message }
    }

    #[must_use]
    pub fn normal(subject: Subject, reason: &str, action: &str, message: String) -> Self {
        Self { is_warning: false, ..Self::warning(subject, reason, action, message) }
    }
}

/// A handle that accepts [`ObjectEvent`]s. Cheap to clone; all clones share one queue.
#[derive(Clone, Debug)]
pub struct EventRecorder(Option<Poster>);

#[derive(Clone, Debug)]
struct Poster {
    sender: mpsc::Sender<ObjectEvent>,
    uids: Uids,
}

/// UIDs of all Services and of this node's Node (without a namespace), from watches: `kubectl
/// describe` finds Events by them.
type Uids = Arc<Mutex<HashMap<ServiceName, Box<str>>>>;

fn lock(uids: &Uids) -> MutexGuard<'_, HashMap<ServiceName, Box<str>>> {
    uids.lock().unwrap_or_else(PoisonError::into_inner)
}

impl EventRecorder {
    /// Returns a recorder for sources that cannot post Events.
    pub(super) fn nowhere() -> Self {
        Self(None)
    }

    /// Posts an Event without waiting. The first one of an object and reason is posted at once, or
    /// some minutes later if there are many; those that follow within ten minutes are combined into
    /// one Event at the end of that time. Events are lost while the queue is full.
    pub fn post(&self, event: ObjectEvent) {
        if let Some(poster) = &self.0
            && let Err(error) = poster.sender.try_send(event)
        {
            debug!("event not posted: {error}");
        }
    }

    /// Records the UID of an object that Events may be about.
    pub(super) fn seen(&self, name: &ServiceName, uid: Option<&str>) {
        if let (Some(poster), Some(uid)) = (&self.0, uid) {
            lock(&poster.uids).insert(name.clone(), uid.into());
        }
    }

    /// Forgets all Services, at the beginning of a list of Services.
    pub(super) fn forget_services(&self) {
        if let Some(poster) = &self.0 {
            lock(&poster.uids).retain(|name, _| name.namespace.is_empty());
        }
    }

    /// Forgets an object that was deleted.
    pub(super) fn gone(&self, name: &ServiceName) {
        if let Some(poster) = &self.0 {
            lock(&poster.uids).remove(name);
        }
    }
}

/// Returns the recorder, and the task that posts the Events it receives.
pub(super) fn channel(client: Client, node_name: String) -> (EventRecorder, impl Future<Output = ()>) {
    let (recorder, receiver, uids) = queue();
    (recorder, post_all(client, node_name, receiver, uids))
}

/// Returns a recorder and its queue, whose length is the number of objects and reasons that the
/// correlator remembers: the first sync may report all Services at once.
fn queue() -> (EventRecorder, mpsc::Receiver<ObjectEvent>, Uids) {
    let (sender, receiver) = mpsc::channel(REMEMBERED);
    let uids = Uids::default();
    (EventRecorder(Some(Poster { sender, uids: Arc::clone(&uids) })), receiver, uids)
}

async fn post_all(client: Client, node_name: String, mut events: mpsc::Receiver<ObjectEvent>, uids: Uids) {
    let reporter = Reporter { controller: "traffic-policy".to_owned(), instance: Some(node_name.clone()) };
    let recorder = Recorder::new(client, reporter);
    let mut correlator = Correlator::new(Instant::now(), random);
    loop {
        let now = Instant::now();
        let post = tokio::select! {
            event = events.recv() => match event {
                Some(event) => Vec::from_iter(correlator.admit(event, Instant::now())),
                None => return,
            },
            () = sleep_until(correlator.next().unwrap_or(now + WINDOW)) => correlator.due(Instant::now()),
        };
        for event in post {
            publish(&recorder, event, &node_name, &uids).await;
        }
    }
}

async fn publish(recorder: &Recorder, event: ObjectEvent, node_name: &str, uids: &Uids) {
    let reference = match &event.subject {
        Subject::Service(service) => service_reference(service, uids),
        Subject::Node => node_reference(node_name, uids),
    };
    let subject = event.subject.clone();
    if let Err(error) = recorder.publish(&posted(event), &reference).await {
        debug!("event about {subject:?} not posted: {error}");
    }
}

fn posted(event: ObjectEvent) -> Event {
    Event {
        type_: if event.is_warning { EventType::Warning } else { EventType::Normal },
        reason: event.reason,
        // The API server rejects an Event with a longer note.
        note: Some(note(event.message, "")),
        action: event.action,
        secondary: None,
    }
}

fn service_reference(service: &ServiceName, uids: &Uids) -> ObjectReference {
    ObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("Service".to_owned()),
        namespace: Some(service.namespace.clone()),
        name: Some(service.name.clone()),
        uid: lock(uids).get(service).map(ToString::to_string),
        ..ObjectReference::default()
    }
}

/// Returns a reference to a Node with its UID, or with its name if the UID is not known, as in
/// kubelet's own Events: `kubectl describe` finds both.
fn node_reference(name: &str, uids: &Uids) -> ObjectReference {
    let node = ServiceName { namespace: String::new(), name: name.to_owned() };
    let uid = lock(uids).get(&node).map_or_else(|| name.to_owned(), ToString::to_string);
    ObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("Node".to_owned()),
        name: Some(name.to_owned()),
        uid: Some(uid),
        ..ObjectReference::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The task that posts reads nothing before the run loop has processed all Services.
    #[test]
    fn what_one_sync_tells_of_a_thousand_services_waits() {
        let (recorder, mut waiting, _) = queue();
        for i in 0..1000 {
            let service = ServiceName { namespace: "ns".to_owned(), name: format!("s{i}") };
            let subject = Subject::Service(service);
            recorder.post(ObjectEvent::warning(subject, "Misconfigured", "Program", "bad".to_owned()));
        }
        let mut read = 0;
        while waiting.try_recv().is_ok() {
            read += 1;
        }
        assert_eq!(read, 1000);
    }

    /// A Service may have 50 mistakes, of 80 characters each.
    #[test]
    fn a_first_event_is_no_longer_than_the_api_server_takes() {
        let subject = || Subject::Node;
        let long = ObjectEvent::warning(subject(), "Misconfigured", "Program", "\u{e4}b".repeat(1000));
        assert_eq!(posted(long).note.unwrap(), "\u{e4}b".repeat(341));
        let short = ObjectEvent::normal(subject(), "Drained", "Drain", "for 30 s".to_owned());
        assert_eq!(posted(short).note.as_deref(), Some("for 30 s"));
    }
}
