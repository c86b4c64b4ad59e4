//! One kind of object, listed and watched forever.

mod listing;
mod outage;
mod sink;

use std::{collections::BTreeSet, fmt::Debug, pin::pin, time::Duration};

use futures::{Stream, StreamExt};
use kube::{
    Api, Resource,
    core::DeserializeGuard,
    runtime::{
        utils::Backoff,
        watcher::{self, DefaultBackoff, watcher},
    },
};
use serde::de::DeserializeOwned;
use tokio::time::{Instant, sleep, timeout_at};
use tracing::{debug, info, warn};

pub(super) use self::sink::{OwnNode, Sink};
use self::{
    listing::{Listing, is_too_large_version, refusal, start_delay},
    sink::Stopped,
};
use super::{
    deadline::WHOLE,
    observe::{API_SERVER, chain},
};
use crate::{
    model::ServiceName,
    source::{
        batch::{Change, Update},
        chance::random,
        convert::FieldError,
        events::{ObjectEvent, Subject},
    },
};

/// A kind of object, its conversion, and the handling of its objects.
pub(super) struct Kind<K, T> {
    pub(super) plural: &'static str,
    /// The consequence of doing without the kind, if not every API server has it or not every role
    /// may read it.
    pub(super) without: Option<&'static str>,
    pub(super) convert: fn(&K) -> Result<Option<T>, FieldError>,
    pub(super) update: fn(Change<T>) -> Update,
}

/// The pause before a kind that the API server refuses is requested again, by each node of a
/// cluster.
const REFUSED: Duration = Duration::from_secs(600);

/// The time limit of each event of a watch that begins with all objects, until the watch reports
/// that they are complete: an API server that does not know such watches never does.
const STREAMING: Duration = Duration::from_secs(10);

/// Runs until the run loop is gone.
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
        listing: Listing::Streaming,
        from_cache: Listing::Streaming,
        chance: random,
        in_list: true,
        begun: None,
        whole: WHOLE,
        listed: false,
        refused: false,
        path: api.resource_url().to_owned(),
        newest: 0,
        uid: None,
        failing: None,
    };
    sleep(start_delay()).await;
    let mut backoff = DefaultBackoff::default();
    loop {
        watch.in_list = true;
        let pause =
            match watch.follow(watcher(api.clone(), watch.listing.config(&config)), &mut backoff).await {
                Ok(pause) => pause,
                Err(Stopped) => return,
            };
        // The watcher starts again with a list.
        sleep(pause).await;
    }
}

/// The reason to stop reading a stream of events.
enum Ended {
    /// The history is lost, for this watch as for those of all nodes: all objects must be requested
    /// again.
    Expired,
    /// All objects must be requested again.
    Relist,
    /// The API server refuses the kind.
    Refused,
}

struct Watch<K, T> {
    kind: Kind<K, T>,
    sink: Sink,
    /// The objects of a list in progress. A list counts only as a whole: it also shows which
    /// objects are gone.
    list: Vec<T>,
    /// Objects that exist but could not be parsed.
    unreadable: BTreeSet<ServiceName>,
    /// The value of `unreadable` before the list in progress.
    unreadable_before: BTreeSet<ServiceName>,
    listing: Listing,
    /// The method of listing that is tried first, as far as this API server supports it.
    from_cache: Listing,
    /// The source of random numbers.
    chance: fn() -> u64,
    /// Whether the current watcher has yet to deliver all objects.
    in_list: bool,
    /// The time when the list in progress began.
    begun: Option<Instant>,
    /// The time limit for all of a list that a watch delivers: each event has [`STREAMING`], but
    /// they may trickle.
    whole: Duration,
    listed: bool,
    /// Whether the API server refuses this kind, which has been logged.
    refused: bool,
    /// The URL path of lists and watches.
    path: String,
    /// The newest version in the list in progress.
    newest: u64,
    /// The UID of the Node in the list in progress.
    uid: Option<Box<str>>,
    /// Times of the first and the last error since the last event of objects.
    failing: Option<(Instant, Instant)>,
}

impl<K: Resource<DynamicType = ()>, T> Watch<K, T> {
    /// Reads a stream until it ends. Returns the pause before the next one, which begins with a
    /// list.
    async fn follow(
        &mut self,
        stream: impl Stream<Item = watcher::Result<watcher::Event<DeserializeGuard<K>>>>,
        backoff: &mut DefaultBackoff,
    ) -> Result<Duration, Stopped> {
        let mut stream = pin!(stream);
        self.begun = None;
        loop {
            let next = match self.begun {
                Some(begun) if self.listing == Listing::Streaming => {
                    let (event, whole) = (Instant::now() + STREAMING, begun + self.whole);
                    match timeout_at(event.min(whole), stream.next()).await {
                        Ok(next) if Instant::now() < whole => next,
                        _ => {
                            self.stalled(event < whole);
                            return Ok(Duration::ZERO);
                        }
                    }
                }
                _ => stream.next().await,
            };
            match next {
                Some(Ok(event)) => {
                    // The watcher announces a list before it requests it.
                    if !matches!(event, watcher::Event::Init) {
                        self.failing = None;
                        backoff.reset();
                    }
                    self.event(event).await?;
                }
                Some(Err(error)) => {
                    let ended = self.error(&error).await?;
                    let since = self.failing_since();
                    let pause = backoff.next().unwrap_or(REFUSED);
                    match ended {
                        Some(Ended::Refused) => return Ok(REFUSED),
                        Some(Ended::Expired) => {
                            let pause = self.relist_delay().max(pause);
                            self.stale(since, "the API server's history does not reach back to it", pause);
                            return Ok(pause);
                        }
                        Some(Ended::Relist) => {
                            self.stale(since, "the list of all of them failed", pause);
                            return Ok(pause);
                        }
                        // The watcher resumes where it was.
                        None => sleep(pause).await,
                    }
                }
                None => return Ok(backoff.next().unwrap_or(REFUSED)),
            }
        }
    }

    async fn event(&mut self, event: watcher::Event<DeserializeGuard<K>>) -> Result<(), Stopped> {
        self.note_uid(&event);
        self.note_node(&event);
        self.note_version(&event);
        match event {
            watcher::Event::Init => {
                self.begun.get_or_insert_with(Instant::now);
                self.list.clear();
                self.unreadable_before.append(&mut self.unreadable);
            }
            watcher::Event::InitApply(object) => {
                if let Ok(Some(converted)) = self.read(&object) {
                    self.list.push(converted);
                }
            }
            watcher::Event::InitDone => {
                self.begun = None;
                self.in_list = false;
                self.sink.status.followed(self.kind.plural);
                self.listing = self.from_cache;
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

    /// Notes the version of an event: the next list must not be older.
    fn note_version(&mut self, event: &watcher::Event<DeserializeGuard<K>>) {
        let known = &self.sink.known;
        match event {
            watcher::Event::Init => self.newest = 0,
            watcher::Event::InitApply(object) => {
                let version =
                    object.meta().resource_version.as_deref().and_then(|version| version.parse().ok());
                self.newest = self.newest.max(version.unwrap_or(0));
            }
            watcher::Event::InitDone => known.note_at_least(&self.path, self.newest),
            watcher::Event::Apply(object) | watcher::Event::Delete(object) => {
                if let Some(version) = &object.meta().resource_version {
                    known.note(&self.path, version);
                }
            }
        }
    }

    /// Notes the UID of a Service or of this node's Node, the only one that is watched: Events are
    /// about these.
    fn note_uid(&self, event: &watcher::Event<DeserializeGuard<K>>) {
        if !matches!(&*K::kind(&()), "Service" | "Node") {
            return;
        }
        let events = &self.sink.events;
        match event {
            watcher::Event::Apply(object) | watcher::Event::InitApply(object) => {
                events.seen(&full_name(object), object.meta().uid.as_deref());
            }
            watcher::Event::Delete(object) => events.gone(&full_name(object)),
            watcher::Event::Init if K::kind(&()) == "Service" => events.forget_services(),
            watcher::Event::Init | watcher::Event::InitDone => {}
        }
    }

    /// Notes whether this node's Node exists, and its UID: the node's Leases belong to it.
    fn note_node(&mut self, event: &watcher::Event<DeserializeGuard<K>>) {
        if K::kind(&()) != "Node" {
            return;
        }
        let uid_of = |object: &DeserializeGuard<K>| object.meta().uid.as_deref().map(Into::into);
        let node = match event {
            watcher::Event::Init => {
                self.uid = None;
                return;
            }
            watcher::Event::InitApply(object) => {
                self.uid = uid_of(object);
                return;
            }
            watcher::Event::InitDone => self.uid.take(),
            watcher::Event::Apply(object) => uid_of(object),
            watcher::Event::Delete(_) => None,
        };
        let node = node.map_or(OwnNode::Missing, OwnNode::Uid);
        self.sink.own_node.send_if_modified(|held| {
            let differs = *held != node;
            *held = node;
            differs
        });
    }

    async fn listed(&mut self) -> Result<(), Stopped> {
        if !std::mem::replace(&mut self.listed, true) {
            self.sink.status.listed(self.kind.plural);
            info!("{} are listed", self.kind.plural);
            self.sink.listed().await?;
        }
        Ok(())
    }

    /// Reports an error. `None`: the watcher resumes where it was.
    async fn error(&mut self, error: &watcher::Error) -> Result<Option<Ended>, Stopped> {
        if self.kind.without.is_some() && refusal(error).is_some() {
            self.refused(error).await?;
            return Ok(Some(Ended::Refused));
        }
        let status = match error {
            watcher::Error::WatchError(status)
            | watcher::Error::InitialListFailed(kube::Error::Api(status))
            | watcher::Error::WatchStartFailed(kube::Error::Api(status)) => Some(&**status),
            _ => None,
        };
        let code = status.map(|status| status.code);
        if self.in_list && self.listing == Listing::Streaming && matches!(code, Some(400 | 422)) {
            debug!(kind = self.kind.plural, "no streaming lists: {error}");
            (self.listing, self.from_cache) = (Listing::Cached, Listing::Cached);
            return Ok(Some(Ended::Relist));
        }
        // The cache has not reached the known version: it lags, or etcd was restored from a backup.
        let behind = code == Some(410) || status.is_some_and(is_too_large_version);
        if self.in_list && self.listing != Listing::Latest && behind {
            debug!(kind = self.kind.plural, "not from the cache: {error}");
            self.listing = Listing::Latest;
            return Ok(Some(Ended::Relist));
        }
        // The history no longer reaches back that far. The watcher recognises this only as an
        // event, and would request the same version forever.
        if code == Some(410) {
            debug!(kind = self.kind.plural, "listing anew: {error}");
            return Ok(Some(if self.in_list { Ended::Relist } else { Ended::Expired }));
        }
        self.report(error);
        // This applies to errors of a list, too: the next one must be of the kind that is due.
        Ok(matches!(error, watcher::Error::NoResourceVersion).then_some(Ended::Relist))
    }

    /// Lets the other kinds go on without this one.
    async fn refused(&mut self, error: &watcher::Error) -> Result<(), Stopped> {
        if let (false, Some(status), Some(without)) = (self.refused, refusal(error), self.kind.without) {
            warn!(
                "the API server gives no {}: {} ({}); {without}",
                self.kind.plural, status.message, status.code
            );
        }
        self.refused = true;
        self.sink.status.followed(self.kind.plural);
        self.listed().await
    }

    async fn send(&self, change: Change<T>) -> Result<(), Stopped> {
        self.sink.send((self.kind.update)(change)).await
    }

    /// Converts an object. `Ok(None)` if this proxy does not handle it.
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
                    let subject = Subject::Service(name.clone());
                    self.sink.events.post(ObjectEvent::warning(subject, "Misconfigured", "Read", message));
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

    fn report(&self, error: &watcher::Error) {
        match error {
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

/// The error of an object that cannot be converted: it has been reported and keeps its last known
/// form.
struct Unreadable;

/// Returns namespace and name. Objects of the cluster (Nodes) have the empty namespace.
fn full_name<K: Resource>(object: &K) -> ServiceName {
    let metadata = object.meta();
    ServiceName {
        namespace: metadata.namespace.clone().unwrap_or_default(),
        name: metadata.name.clone().unwrap_or_default(),
    }
}

#[cfg(test)]
mod tests;
