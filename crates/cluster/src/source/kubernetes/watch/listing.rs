//! Methods of listing all objects of a kind, and the refusals of API servers.

use std::time::Duration;

use kube::{core::Status, runtime::watcher};

use crate::source::chance::random;

/// A method of listing all objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Listing {
    /// The beginning of a watch, from the API server's cache (Kubernetes 1.32 and later).
    Streaming,
    /// A list from the API server's cache: it may be as old as that, like the events of watches,
    /// but is not older than the state with which the last watch began
    /// ([`crate::source::kubernetes::known_versions`]).
    Cached,
    /// A list from etcd, in pages: for API servers whose cache does not suffice.
    Latest,
}

impl Listing {
    pub(super) fn config(self, of: &watcher::Config) -> watcher::Config {
        let config = of.clone().timeout(watch_seconds());
        match self {
            Self::Streaming => config.streaming_lists(),
            // Pages come from etcd.
            Self::Cached => watcher::Config { page_size: None, ..config.any_semantic() },
            Self::Latest => config,
        }
    }
}

/// Returns the number of seconds after which the API server ends a watch: random, so that not all
/// nodes request new ones at once. Similar to client-go, but below the 295 s that a watch of `kube`
/// may be silent at most.
fn watch_seconds() -> u32 {
    let seconds = random() % 90;
    200 + u32::try_from(seconds).unwrap_or(0)
}

/// Returns a random delay, so that nodes that start together, as after a power cut, do not send
/// requests at the same moment.
pub(super) fn start_delay() -> Duration {
    Duration::from_millis(random() % 500)
}

/// Whether the API server's cache has not reached the requested version, detected as client-go
/// does.
pub(super) fn is_too_large_version(status: &Status) -> bool {
    let causes = status.details.iter().flat_map(|details| &details.causes);
    causes.into_iter().any(|cause| cause.reason == "ResourceVersionTooLarge")
        || status.message.contains("Too large resource version")
}

/// Returns the status of a refusal: the API server does not have the resource, or the role does not
/// include it.
pub(super) fn refusal(error: &watcher::Error) -> Option<&Status> {
    match error {
        watcher::Error::InitialListFailed(kube::Error::Api(status))
        | watcher::Error::WatchStartFailed(kube::Error::Api(status))
        | watcher::Error::WatchError(status) => matches!(status.code, 403 | 404).then_some(&**status),
        _ => None,
    }
}
