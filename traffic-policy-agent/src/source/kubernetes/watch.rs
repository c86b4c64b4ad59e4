//! One kind of object, listed and watched for ever.

use std::{
    collections::BTreeSet,
    fmt::Debug,
    hash::{BuildHasher, Hasher, RandomState},
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use futures::{Stream, StreamExt};
use kube::{
    Api, Resource,
    core::{DeserializeGuard, Status},
    runtime::{
        utils::Backoff,
        watcher::{self, DefaultBackoff, watcher},
    },
};
use serde::de::DeserializeOwned;
use tokio::{
    sync::mpsc,
    time::{Instant, sleep, timeout_at},
};
use tracing::{debug, info, warn};

use super::{
    deadline::WHOLE,
    observe::{API_SERVER, chain},
};
use crate::{
    model::ServiceName,
    source::{
        batch::{Batch, Change, Update},
        convert::FieldError,
        events::{EventRecorder, ObjectEvent, Subject},
        status::StatusWriter,
    },
};

/// A kind of object, how it is understood, and what becomes of it.
pub(super) struct Kind<K, T> {
    pub(super) plural: &'static str,
    /// Consequence of doing without them, for a kind that not every API server has, or not every role may read.
    pub(super) without: Option<&'static str>,
    pub(super) convert: fn(&K) -> Result<Option<T>, FieldError>,
    pub(super) update: fn(Change<T>) -> Update,
}

/// Destination of the events of one source's watches.
#[derive(Clone)]
pub(super) struct Sink {
    pub(super) sender: mpsc::Sender<Batch>,
    pub(super) status: StatusWriter,
    pub(super) events: EventRecorder,
    /// Number of first lists still to come.
    pub(super) lists: Arc<AtomicUsize>,
}

/// Pause before a kind that the API server refuses is requested again. Each node of a cluster asks.
const REFUSED: Duration = Duration::from_secs(600);

/// The run loop is gone: watches end.
struct Stopped;

impl Sink {
    async fn send(&self, update: Update) -> Result<(), Stopped> {
        self.status.sending();
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

/// Method of listing all objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Listing {
    /// As the beginning of a watch, from the API server's cache (Kubernetes 1.32 and later).
    Streaming,
    /// As a list from the API server's cache: may be as old as that, like what watches say.
    Cached,
    /// As a list from etcd, in pages: after a version that the cache did not hold any more.
    Latest,
}

impl Listing {
    fn config(self, of: &watcher::Config) -> watcher::Config {
        let config = of.clone().timeout(watch_seconds());
        match self {
            Self::Streaming => config.streaming_lists(),
            // Pages come from etcd.
            Self::Cached => watcher::Config { page_size: None, ..config.any_semantic() },
            Self::Latest => config,
        }
    }
}

/// After how many seconds the API server is to end a watch: by chance, lest all nodes ask for new ones together. As
/// client-go, but below the 295 s that a watch of `kube` is silent at most.
fn watch_seconds() -> u32 {
    let seconds = random() % 90;
    200 + u32::try_from(seconds).unwrap_or(0)
}

/// Nodes that start together, as after a power cut, do not ask in the same moment.
fn start_delay() -> Duration {
    Duration::from_millis(random() % 500)
}

fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}

/// A watch that begins with all objects goes on at least this often until it has given them. One of an API server that
/// does not know such watches never says that it has.
const STREAMING: Duration = Duration::from_secs(10);

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
        listing: Listing::Streaming,
        begun: None,
        whole: WHOLE,
        listed: false,
        refused: false,
    };
    sleep(start_delay()).await;
    let mut backoff = DefaultBackoff::default();
    loop {
        let pause =
            match watch.follow(watcher(api.clone(), watch.listing.config(&config)), &mut backoff).await {
                Ok(pause) => pause,
                Err(Stopped) => return,
            };
        // The watcher begins anew: with a list.
        sleep(pause).await;
    }
}

/// Why a stream of events is not read on.
enum Ended {
    /// All objects are to be asked for anew.
    Relist,
    /// The API server does not give the kind.
    Refused,
}

/// Refusal by the API server: it does not have the resource, or the role does not name it.
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
    listing: Listing,
    /// When the list that is under way began.
    begun: Option<Instant>,
    /// For all of a list that a watch gives: each event has [`STREAMING`], but they may trickle.
    whole: Duration,
    listed: bool,
    /// The API server does not give this kind, as has been logged.
    refused: bool,
}

impl<K: Resource<DynamicType = ()>, T> Watch<K, T> {
    /// Reads a stream as long as it goes on. Returns how long to pause before the next one, which begins with a list.
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
                    // Of a list it comes before the request.
                    if !matches!(event, watcher::Event::Init) {
                        backoff.reset();
                    }
                    self.event(event).await?;
                }
                Some(Err(error)) => {
                    let ended = self.error(&error).await?;
                    let pause = backoff.next().unwrap_or(REFUSED);
                    match ended {
                        Some(Ended::Refused) => return Ok(REFUSED),
                        Some(Ended::Relist) => return Ok(pause),
                        // It goes on where it was.
                        None => sleep(pause).await,
                    }
                }
                None => return Ok(backoff.next().unwrap_or(REFUSED)),
            }
        }
    }

    /// A watch did not give all objects.
    fn stalled(&mut self, silent: bool) {
        let plural = self.kind.plural;
        let text = if silent {
            format!("the list of {plural} stopped in the middle")
        } else {
            format!("the list of {plural} did not end within {} s", self.whole.as_secs())
        };
        self.sink.status.trouble(API_SERVER, text);
        self.listing = Listing::Cached;
    }

    async fn event(&mut self, event: watcher::Event<DeserializeGuard<K>>) -> Result<(), Stopped> {
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
                // From now on a list is only asked for when the cache does not do.
                self.listing = Listing::Latest;
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

    /// Reports an error. `None`: the watcher goes on where it was.
    async fn error(&mut self, error: &watcher::Error) -> Result<Option<Ended>, Stopped> {
        if self.kind.without.is_some() && refusal(error).is_some() {
            self.refused(error).await?;
            return Ok(Some(Ended::Refused));
        }
        let code = match error {
            watcher::Error::WatchError(status)
            | watcher::Error::InitialListFailed(kube::Error::Api(status))
            | watcher::Error::WatchStartFailed(kube::Error::Api(status)) => Some(status.code),
            _ => None,
        };
        // The history does not reach back so far any more. The watcher knows it as an event only, and would ask for the
        // same version for ever.
        if code == Some(410) {
            debug!(kind = self.kind.plural, "listing anew: {error}");
            return Ok(Some(Ended::Relist));
        }
        if self.listing == Listing::Streaming && matches!(code, Some(400 | 422)) {
            debug!(kind = self.kind.plural, "no streaming lists: {error}");
            self.listing = Listing::Cached;
            return Ok(Some(Ended::Relist));
        }
        self.report(error);
        // Also from a list: the next one is to be of the kind that is due.
        Ok(matches!(error, watcher::Error::NoResourceVersion).then_some(Ended::Relist))
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

#[cfg(test)]
mod tests;
