//! Kubernetes Events about Services and the own Node, which `kubectl describe` shows.

use k8s_openapi::api::core::v1::{Node, ObjectReference, Service};
use kube::{
    Api, Client,
    api::ListParams,
    runtime::events::{Event, EventType, Recorder, Reporter},
};
use tokio::sync::mpsc;
use tracing::debug;

use crate::model::ServiceName;

/// An object that has Events.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Subject {
    Service(ServiceName),
    /// The Node that the agent runs on.
    Node,
}

/// Something that happened to an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectEvent {
    pub subject: Subject,
    /// Somebody should look at it.
    pub is_warning: bool,
    /// Why, in one CamelCase word, such as `FailedToStartServiceHealthcheck`.
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

/// The place where [`ObjectEvent`]s are put.
#[derive(Clone, Debug)]
pub struct EventRecorder(Option<mpsc::Sender<ObjectEvent>>);

impl EventRecorder {
    /// For sources that have no place for Events.
    pub(super) fn nowhere() -> Self {
        Self(None)
    }

    /// Posts an Event, soon and without waiting. Events are best effort: while many are waiting, further ones are lost.
    pub fn post(&self, event: ObjectEvent) {
        if let Some(sender) = &self.0
            && let Err(error) = sender.try_send(event)
        {
            debug!("event not posted: {error}");
        }
    }
}

/// The recorder, and the task that posts what it is given.
pub(super) fn channel(client: Client, node_name: String) -> (EventRecorder, impl Future<Output = ()>) {
    let (sender, receiver) = mpsc::channel(64);
    (EventRecorder(Some(sender)), post_all(client, node_name, receiver))
}

async fn post_all(client: Client, node_name: String, mut events: mpsc::Receiver<ObjectEvent>) {
    let reporter = Reporter { controller: "traffic-policy".to_owned(), instance: Some(node_name.clone()) };
    let recorder = Recorder::new(client.clone(), reporter);
    while let Some(event) = events.recv().await {
        let reference = match &event.subject {
            Subject::Service(service) => service_reference(&client, service).await,
            Subject::Node => node_reference(&client, &node_name).await,
        };
        let type_ = if event.is_warning { EventType::Warning } else { EventType::Normal };
        let posted = Event {
            type_,
            reason: event.reason,
            note: Some(event.message),
            action: event.action,
            secondary: None,
        };
        if let Err(error) = recorder.publish(&posted, &reference).await {
            debug!("event about {:?} not posted: {error}", event.subject);
        }
    }
}

/// `kubectl describe` finds Events by the object's UID. A list, because proxies may list Services but not get one.
async fn service_reference(client: &Client, service: &ServiceName) -> ObjectReference {
    let api: Api<Service> = Api::namespaced(client.clone(), &service.namespace);
    let one = ListParams::default().fields(&format!("metadata.name={}", service.name));
    let found = api.list_metadata(&one).await.ok().and_then(|list| list.items.into_iter().next());
    ObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("Service".to_owned()),
        namespace: Some(service.namespace.clone()),
        name: Some(service.name.clone()),
        uid: found.and_then(|found| found.metadata.uid),
        ..ObjectReference::default()
    }
}

/// Also by its UID, and by its name where that is not known, as kubelet's own Events have it: `kubectl describe` finds both.
async fn node_reference(client: &Client, name: &str) -> ObjectReference {
    let api: Api<Node> = Api::all(client.clone());
    let one = ListParams::default().fields(&format!("metadata.name={name}"));
    let found = api.list_metadata(&one).await.ok().and_then(|list| list.items.into_iter().next());
    let uid = found.and_then(|found| found.metadata.uid).unwrap_or_else(|| name.to_owned());
    ObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("Node".to_owned()),
        name: Some(name.to_owned()),
        uid: Some(uid),
        ..ObjectReference::default()
    }
}
