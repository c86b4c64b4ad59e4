//! Ways of asking for all objects of a kind, and what API servers say to them.

use std::time::Duration;

use kube::{core::Status, runtime::watcher};

use crate::source::chance::random;

/// Method of listing all objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Listing {
    /// As the beginning of a watch, from the API server's cache (Kubernetes 1.32 and later).
    Streaming,
    /// As a list from the API server's cache: may be as old as that, like what watches say, but is not older than what the last
    /// watch began with ([`crate::source::kubernetes::known_versions`]).
    Cached,
    /// As a list from etcd, in pages: where the cache does not do.
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

/// After how many seconds the API server is to end a watch: by chance, lest all nodes ask for new ones together. As
/// client-go, but below the 295 s that a watch of `kube` is silent at most.
fn watch_seconds() -> u32 {
    let seconds = random() % 90;
    200 + u32::try_from(seconds).unwrap_or(0)
}

/// Nodes that start together, as after a power cut, do not ask in the same moment.
pub(super) fn start_delay() -> Duration {
    Duration::from_millis(random() % 500)
}

/// The API server's cache does not reach the version that is asked for. Told as client-go tells it.
pub(super) fn is_too_large_version(status: &Status) -> bool {
    let causes = status.details.iter().flat_map(|details| &details.causes);
    causes.into_iter().any(|cause| cause.reason == "ResourceVersionTooLarge")
        || status.message.contains("Too large resource version")
}

/// Refusal by the API server: it does not have the resource, or the role does not name it.
pub(super) fn refusal(error: &watcher::Error) -> Option<&Status> {
    match error {
        watcher::Error::InitialListFailed(kube::Error::Api(status))
        | watcher::Error::WatchStartFailed(kube::Error::Api(status))
        | watcher::Error::WatchError(status) => matches!(status.code, 403 | 404).then_some(&**status),
        _ => None,
    }
}
