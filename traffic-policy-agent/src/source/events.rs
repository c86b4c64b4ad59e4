//! Kubernetes Events about Services, which `kubectl describe` shows.

use k8s_openapi::api::core::v1::{ObjectReference, Service};
use kube::{
    Api, Client,
    api::ListParams,
    runtime::events::{Event, EventType, Recorder, Reporter},
};
use tokio::sync::mpsc;
use tracing::debug;

use crate::model::ServiceName;

/// A warning about one Service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceEvent {
    pub service: ServiceName,
    /// Why, in one CamelCase word, such as `FailedToStartServiceHealthcheck`.
    pub reason: String,
    /// What was tried, in one CamelCase word, such as `Listen`.
    pub action: String,
    /// One sentence.
    pub message: String,
}

/// Where [`ServiceEvent`]s are put.
#[derive(Clone, Debug)]
pub struct ServiceEvents(Option<mpsc::Sender<ServiceEvent>>);

impl ServiceEvents {
    /// For sources that have no place for Events.
    pub(super) fn nowhere() -> Self {
        Self(None)
    }

    /// Posts an Event, soon and without waiting. Events are best effort: while many are waiting, further ones are lost.
    pub fn post(&self, event: ServiceEvent) {
        if let Some(sender) = &self.0
            && let Err(error) = sender.try_send(event)
        {
            debug!("event not posted: {error}");
        }
    }
}

/// The place for Events, and the task that posts them.
pub(super) fn channel(client: Client, node_name: String) -> (ServiceEvents, impl Future<Output = ()>) {
    let (sender, receiver) = mpsc::channel(64);
    (ServiceEvents(Some(sender)), post_all(client, node_name, receiver))
}

async fn post_all(client: Client, node_name: String, mut events: mpsc::Receiver<ServiceEvent>) {
    let reporter = Reporter { controller: "traffic-policy".to_owned(), instance: Some(node_name) };
    let recorder = Recorder::new(client.clone(), reporter);
    while let Some(event) = events.recv().await {
        let reference = reference(&client, &event.service).await;
        let posted = Event {
            type_: EventType::Warning,
            reason: event.reason,
            note: Some(event.message),
            action: event.action,
            secondary: None,
        };
        if let Err(error) = recorder.publish(&posted, &reference).await {
            debug!("event about Service {} not posted: {error}", event.service);
        }
    }
}

/// `kubectl describe` finds Events by the object's UID. A list, because proxies may list Services but not get one.
async fn reference(client: &Client, service: &ServiceName) -> ObjectReference {
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
