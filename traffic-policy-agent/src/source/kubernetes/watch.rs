//! One kind of object, listed and watched for ever.

use std::{
    collections::BTreeSet,
    fmt::Debug,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use futures::StreamExt;
use kube::{
    Api, Resource,
    core::{DeserializeGuard, Status},
    runtime::{WatchStreamExt, watcher},
};
use serde::de::DeserializeOwned;
use tokio::{sync::mpsc, time::sleep};
use tracing::{debug, info, warn};

use super::observe::{API_SERVER, chain};
use crate::{
    model::ServiceName,
    source::{
        batch::{Batch, Change, Update},
        convert::FieldError,
        events::{ServiceEvent, ServiceEvents},
        status::StatusWriter,
    },
};

/// What is watched, and what becomes of it.
pub(super) struct Kind<K, T> {
    pub(super) plural: &'static str,
    /// What it means to go on without them, for a kind that not every API server has, or not for every role.
    pub(super) without: Option<&'static str>,
    pub(super) convert: fn(&K) -> Result<Option<T>, FieldError>,
    pub(super) update: fn(Change<T>) -> Update,
}

/// Where the watches of one source put what they see.
#[derive(Clone)]
pub(super) struct Sink {
    pub(super) sender: mpsc::Sender<Batch>,
    pub(super) status: StatusWriter,
    pub(super) events: ServiceEvents,
    /// How many first lists are still to come.
    pub(super) lists: Arc<AtomicUsize>,
}

/// How long a kind that the API server does not give is left alone. Each node of a cluster asks.
const REFUSED: Duration = Duration::from_secs(600);

/// The run loop is gone: there is nobody to watch for.
struct Stopped;

impl Sink {
    async fn send(&self, update: Update) -> Result<(), Stopped> {
        self.sender.send(Batch(vec![update])).await.map_err(|_| Stopped)
    }

    /// Called behind the first list of each kind.
    async fn listed(&self) -> Result<(), Stopped> {
        if self.lists.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.send(Update::Synced).await?;
            self.status.synced();
        }
        Ok(())
    }
}

/// Runs until the run loop goes away.
pub(super) async fn run<K, T>(
    api: Api<DeserializeGuard<K>>,
    config: watcher::Config,
    kind: Kind<K, T>,
    sink: Sink,
) where
    K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Send + 'static,
    T: Send + 'static,
{
    sink.status.waiting(kind.plural);
    let mut watch = Watch {
        kind,
        sink,
        list: Vec::new(),
        unreadable: BTreeSet::new(),
        unreadable_before: BTreeSet::new(),
        listed: false,
        refused: false,
    };
    loop {
        let mut stream = pin!(watcher(api.clone(), config.clone()).default_backoff());
        while let Some(event) = stream.next().await {
            let done = match event {
                Ok(event) => watch.event(event).await,
                Err(error) if watch.does_without(&error) => {
                    if watch.refused(&error).await.is_err() {
                        return;
                    }
                    break;
                }
                Err(error) => {
                    watch.error(&error);
                    Ok(())
                }
            };
            if matches!(done, Err(Stopped)) {
                return;
            }
        }
        sleep(REFUSED).await;
    }
}

/// What the API server answers to who asks for a resource that it does not have, or that the role does not name.
fn refusal(error: &watcher::Error) -> Option<&Status> {
    match error {
        watcher::Error::InitialListFailed(kube::Error::Api(status))
        | watcher::Error::WatchStartFailed(kube::Error::Api(status))
        | watcher::Error::WatchError(status) => matches!(status.code, 403 | 404).then_some(&**status),
        _ => None,
    }
}

struct Watch<K, T> {
    kind: Kind<K, T>,
    sink: Sink,
    /// The objects of a list that is under way. A list counts only as a whole: it also says what is gone.
    list: Vec<T>,
    /// Objects that exist but could not be understood.
    unreadable: BTreeSet<ServiceName>,
    /// The same, before the list that is under way.
    unreadable_before: BTreeSet<ServiceName>,
    listed: bool,
    /// The API server does not give this kind, as has been logged.
    refused: bool,
}

impl<K: Resource<DynamicType = ()>, T> Watch<K, T> {
    async fn event(&mut self, event: watcher::Event<DeserializeGuard<K>>) -> Result<(), Stopped> {
        match event {
            watcher::Event::Init => {
                self.list.clear();
                self.unreadable_before.append(&mut self.unreadable);
            }
            watcher::Event::InitApply(object) => {
                if let Ok(Some(converted)) = self.read(&object) {
                    self.list.push(converted);
                }
            }
            watcher::Event::InitDone => {
                if std::mem::take(&mut self.refused) {
                    info!("{} are given now", self.kind.plural);
                }
                for name in std::mem::take(&mut self.unreadable_before) {
                    if !self.unreadable.contains(&name) {
                        self.readable(&name);
                    }
                }
                let objects = std::mem::take(&mut self.list);
                let unreadable = self.unreadable.iter().cloned().collect();
                self.send(Change::Reset { objects, unreadable }).await?;
                self.listed().await?;
            }
            watcher::Event::Apply(object) => match self.read(&object) {
                Ok(Some(converted)) => self.send(Change::Apply(converted)).await?,
                Ok(None) => self.send(Change::Delete(full_name(&object))).await?,
                Err(Unreadable) => {}
            },
            watcher::Event::Delete(object) => {
                let name = full_name(&object);
                self.readable(&name);
                self.send(Change::Delete(name)).await?;
            }
        }
        Ok(())
    }

    async fn listed(&mut self) -> Result<(), Stopped> {
        if !std::mem::replace(&mut self.listed, true) {
            self.sink.status.listed(self.kind.plural);
            info!("{} are listed", self.kind.plural);
            self.sink.listed().await?;
        }
        Ok(())
    }

    fn does_without(&self, error: &watcher::Error) -> bool {
        self.kind.without.is_some() && refusal(error).is_some()
    }

    /// The others go on without this kind.
    async fn refused(&mut self, error: &watcher::Error) -> Result<(), Stopped> {
        if let (false, Some(status), Some(without)) = (self.refused, refusal(error), self.kind.without) {
            warn!(
                "the API server gives no {}: {} ({}); {without}",
                self.kind.plural, status.message, status.code
            );
        }
        self.refused = true;
        self.listed().await
    }

    async fn send(&self, change: Change<T>) -> Result<(), Stopped> {
        self.sink.send((self.kind.update)(change)).await
    }

    /// `Ok(None)` if the object is not for this proxy.
    fn read(&mut self, object: &DeserializeGuard<K>) -> Result<Option<T>, Unreadable> {
        let name = full_name(object);
        let converted = match &object.0 {
            Ok(object) => (self.kind.convert)(object).map_err(|error| error.to_string()),
            Err(error) => Err(error.to_string()),
        };
        match converted {
            Ok(converted) => {
                self.readable(&name);
                Ok(converted)
            }
            Err(error) => {
                let message = format!("not understood, it stays as it was: {error}");
                let news = self.sink.status.mistake(&self.subject(&name), &*message);
                if news && K::kind(&()) == "Service" {
                    self.sink.events.post(ServiceEvent {
                        service: name.clone(),
                        reason: "Misconfigured".to_owned(),
                        action: "Read".to_owned(),
                        message,
                    });
                }
                self.unreadable.insert(name);
                Err(Unreadable)
            }
        }
    }

    fn readable(&mut self, name: &ServiceName) {
        self.unreadable.remove(name);
        self.sink.status.well(&self.subject(name), "understood again, or gone");
    }

    fn subject(&self, name: &ServiceName) -> String {
        format!("{} {name}", self.kind.plural)
    }

    /// The watcher tries again by itself.
    fn error(&self, error: &watcher::Error) {
        match error {
            // The resource version has grown too old: a relist follows, as the API wants it.
            watcher::Error::WatchError(status) if status.code == 410 => {
                debug!(kind = self.kind.plural, "relisting: {}", status.message);
            }
            watcher::Error::InitialListFailed(kube::Error::Api(status))
            | watcher::Error::WatchStartFailed(kube::Error::Api(status)) => {
                let text = format!("the API server refuses: {} ({})", status.message, status.code);
                self.sink.status.trouble(self.kind.plural, text);
            }
            watcher::Error::WatchError(status) => {
                let text = format!("the watch failed: {} ({})", status.message, status.code);
                self.sink.status.trouble(self.kind.plural, text);
            }
            watcher::Error::InitialListFailed(kube::Error::SerdeError(_))
            | watcher::Error::WatchFailed(kube::Error::SerdeError(_))
            | watcher::Error::NoResourceVersion => {
                self.sink.status.trouble(self.kind.plural, chain(error));
            }
            _ => self.sink.status.trouble(API_SERVER, chain(error)),
        }
    }
}

/// The object has been reported and keeps its last known form.
struct Unreadable;

/// Objects of the cluster (Nodes) have the empty namespace.
fn full_name<K: Resource>(object: &K) -> ServiceName {
    let metadata = object.meta();
    ServiceName {
        namespace: metadata.namespace.clone().unwrap_or_default(),
        name: metadata.name.clone().unwrap_or_default(),
    }
}
