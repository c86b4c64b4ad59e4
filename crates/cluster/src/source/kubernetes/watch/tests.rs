//! Watches on streams made by tests: pauses between lists that fail, and lists that trickle.

use std::sync::{Arc, atomic::AtomicUsize};

use futures::stream;
use k8s_openapi::api::core::v1::Service;
use kube::core::Status;
use tokio::sync::mpsc;

use super::*;
use crate::source::{
    Stale, convert,
    events::EventRecorder,
    kubernetes::known_versions::KnownVersions,
    status::{StatusReader, StatusWriter},
};

type Event = watcher::Event<DeserializeGuard<Service>>;

fn watch(listing: Listing) -> (Watch<Service, crate::model::object::Service>, StatusReader) {
    let (status, reader) = StatusWriter::new();
    // Nothing is sent before the end of a list.
    let (sender, _) = mpsc::channel(1);
    let sink = Sink {
        sender,
        status,
        events: EventRecorder::nowhere(),
        lists: Arc::new(AtomicUsize::new(1)),
        relist_within: Duration::from_secs(30),
        own_node: tokio::sync::watch::Sender::default(),
        known: KnownVersions::default(),
    };
    let kind = Kind {
        plural: "Services",
        without: None,
        convert: |service: &Service| convert::service(service, convert::Author::ApiServer),
        update: Update::Service,
    };
    let watch = Watch {
        kind,
        sink,
        list: Vec::new(),
        unreadable: BTreeSet::new(),
        unreadable_before: BTreeSet::new(),
        listing,
        from_cache: Listing::Streaming,
        in_list: true,
        chance: || 1_012_345,
        begun: None,
        whole: WHOLE,
        listed: false,
        refused: false,
        path: "/api/v1/services".to_owned(),
        newest: 0,
        uid: None,
        failing: None,
    };
    (watch, reader)
}

/// The watcher announces a list before it requests it.
#[tokio::test]
async fn pauses_grow_while_lists_fail() {
    let (mut watch, _) = watch(Listing::Latest);
    let mut backoff = DefaultBackoff::default();
    let mut pauses = Vec::new();
    for _ in 0..4 {
        let gone = Status::failure("too old", "Expired").with_code(410);
        let failed = watcher::Error::InitialListFailed(kube::Error::Api(gone.boxed()));
        let events = stream::iter([Ok(Event::Init), Err(failed)]);
        pauses.push(watch.follow(events, &mut backoff).await.ok().unwrap());
    }
    // The first is between 0.8 s and 1.6 s, and each of the next twice as long.
    assert!(pauses[0] < Duration::from_secs(2) && pauses[3] > Duration::from_secs(4), "{pauses:?}");
    // An event shows that the server works.
    let object = DeserializeGuard(Ok(Service::default()));
    let events = stream::iter([Ok(Event::Init), Ok(Event::InitApply(object))]);
    let pause = watch.follow(events, &mut backoff).await.ok().unwrap();
    assert!(pause < Duration::from_secs(2), "{pause:?}");
}

#[tokio::test]
async fn a_list_that_trickles_is_given_up_and_said() {
    let (mut watch, status) = watch(Listing::Streaming);
    watch.whole = Duration::from_millis(200);
    // Each event comes in time.
    let trickle = stream::unfold(true, |first| async move {
        if first {
            return Some((Ok(Event::Init), false));
        }
        sleep(Duration::from_millis(20)).await;
        Some((Ok(Event::InitApply(DeserializeGuard(Ok(Service::default())))), false))
    });
    let mut backoff = DefaultBackoff::default();
    let followed = watch.follow(trickle, &mut backoff);
    let pause = tokio::time::timeout(Duration::from_secs(20), followed).await.unwrap();
    assert_eq!(pause.ok(), Some(Duration::ZERO));
    assert_eq!(watch.listing, Listing::Cached);
    let errors = status.get().errors;
    assert!(errors[API_SERVER].contains("did not end"), "{errors:?}");
}

/// All nodes of a cluster get 410 at the same moment after an outage beyond compaction.
#[tokio::test]
async fn a_lost_history_is_listed_anew_at_a_moment_of_its_own() {
    let gone = || {
        let gone = Status::failure("too old", "Expired").with_code(410);
        stream::iter([Err(watcher::Error::WatchError(gone.boxed()))])
    };
    let (mut unlisted, _) = watch(Listing::Streaming);
    let pause = unlisted.follow(gone(), &mut DefaultBackoff::default()).await.ok().unwrap();
    assert!(pause < Duration::from_secs(2), "who knows nothing does not wait: {pause:?}");

    let (mut watch, status) = watch(Listing::Streaming);
    (watch.listed, watch.in_list) = (true, false);
    // Errors have occurred for 70 s.
    watch.failing = Instant::now().checked_sub(Duration::from_secs(70)).map(|first| (first, Instant::now()));
    let pause = watch.follow(gone(), &mut DefaultBackoff::default()).await.ok().unwrap();
    assert_eq!(pause, Duration::from_millis(22_345), "as chance will have it, within 30 s");
    let stale = status.get().stale.remove("Services").unwrap();
    assert!(stale.since.elapsed() >= Duration::from_secs(70), "{stale:?}");
    assert!(stale.why.contains("history"), "{stale:?}");
    let due = stale.due.duration_since(std::time::Instant::now());
    assert!(due > Duration::from_secs(2) && due <= Duration::from_millis(22_345), "{stale:?}");
    assert_eq!(watch.listing, Listing::Streaming, "from the cache first");
    // The cache is behind the known version.
    watch.in_list = true;
    let behind = Status::failure("Too large resource version", "Timeout").with_code(504);
    let failed = watcher::Error::WatchStartFailed(kube::Error::Api(behind.boxed()));
    let events = stream::iter([Ok(Event::Init), Err(failed)]);
    let pause = watch.follow(events, &mut DefaultBackoff::default()).await.ok().unwrap();
    assert_eq!(watch.listing, Listing::Latest);
    assert!(pause < Duration::from_secs(2), "{pause:?}");
}

/// A role may lose access to a kind while its objects wait to be listed again.
#[tokio::test]
async fn a_kind_that_is_refused_does_not_wait_to_be_listed() {
    let (mut watch, status) = watch(Listing::Streaming);
    (watch.listed, watch.in_list) = (true, false);
    watch.kind.without = Some("nothing is served");
    let failed = |code, message: &str| {
        let status = Status::failure(message, "x").with_code(code);
        stream::iter([Err(watcher::Error::WatchStartFailed(kube::Error::Api(status.boxed())))])
    };
    let _ = watch.follow(failed(410, "too old"), &mut DefaultBackoff::default()).await;
    assert_eq!(status.get().stale.len(), 1);
    let pause = watch.follow(failed(403, "forbidden"), &mut DefaultBackoff::default()).await;
    assert_eq!((pause.ok(), watch.refused), (Some(REFUSED), true));
    assert!(status.get().stale.is_empty(), "{:?}", status.get().stale);
}

/// An API server whose cache lags could, after 410 in the middle of a watch, list objects older
/// than those that the watch delivered.
#[tokio::test]
async fn a_relist_is_not_older_than_what_the_watch_gave() {
    let (mut watch, status) = watch(Listing::Streaming);
    let (sender, mut receiver) = mpsc::channel(16);
    watch.sink.sender = sender;
    let now = std::time::Instant::now();
    watch.sink.status.stale("Services", Stale { since: now, why: String::new(), due: now });
    let object = |version: &str| {
        let mut service = Service::default();
        service.metadata.resource_version = Some(version.to_owned());
        DeserializeGuard(Ok(service))
    };
    let known = watch.sink.known.clone();
    let mut follow = async |events: Vec<Event>| {
        let events = stream::iter(events.into_iter().map(Ok));
        watch.follow(events, &mut DefaultBackoff::default()).await.ok().unwrap();
    };
    follow(vec![Event::Init, Event::InitApply(object("9")), Event::InitApply(object("12")), Event::InitDone])
        .await;
    let asked = || {
        let uri = "/api/v1/services?watch=true&resourceVersion=0&sendInitialEvents=true".parse().unwrap();
        known.pass(&uri).unwrap().to_string()
    };
    assert!(asked().contains("resourceVersion=12&"));
    assert!(status.get().stale.is_empty(), "it is followed again");
    follow(vec![Event::Apply(object("30"))]).await;
    assert!(asked().contains("resourceVersion=30&"));
    follow(vec![Event::Delete(object("31"))]).await;
    assert!(asked().contains("resourceVersion=31&"));
    let given = std::iter::from_fn(|| receiver.try_recv().ok()).count();
    assert_eq!(
        given, 3,
        "the list, that it was the last kind to come, and what is gone; an empty object is none"
    );
}
