//! Lists from the API server's cache that are not older than what is known already.
//!
//! A watch begins, and begins again, with the version that the watcher knows. So what passes here says which version a list
//! of the same kind may not be older than: the server waits until its cache has it, or refuses.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    task::{Context, Poll},
};

use hyper::{Request, Uri};
use tower::{Layer, Service};

/// The version that is asked for if any will do.
const ANY: &str = "resourceVersion=0";

/// The version up to which a path is known: that which a watch began with, or of the last object that it gave.
#[derive(Clone, Debug, Default)]
pub(super) struct KnownVersions(Arc<Mutex<HashMap<String, String>>>);

impl KnownVersions {
    /// Notes that what a path gives is known up to a version: a watch goes far beyond the one that it began with.
    pub(super) fn note(&self, path: &str, version: &str) {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        known.insert(path.to_owned(), version.to_owned());
    }

    /// Notes that a path has given objects, of which this is the newest version. They may be older than what was deleted.
    pub(super) fn note_at_least(&self, path: &str, version: u64) {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let older = known.get(path).is_none_or(|known| known.parse().is_ok_and(|known: u64| known < version));
        if older {
            known.insert(path.to_owned(), version.to_string());
        }
    }

    /// Notes what a watch knows; asks for no older list.
    pub(super) fn pass(&self, uri: &Uri) -> Option<Uri> {
        let query = uri.query()?;
        let version = query.split('&').find_map(|pair| pair.strip_prefix("resourceVersion="))?;
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if version != "0" {
            if query.split('&').any(|pair| pair == "watch=true") {
                known.insert(uri.path().to_owned(), version.to_owned());
            }
            return None;
        }
        let known = known.get(uri.path())?;
        let pairs: Vec<_> = query
            .split('&')
            .map(|pair| if pair == ANY { format!("resourceVersion={known}") } else { pair.to_owned() })
            .collect();
        let mut parts = uri.clone().into_parts();
        parts.path_and_query = format!("{}?{}", uri.path(), pairs.join("&")).parse().ok();
        Uri::from_parts(parts).ok()
    }
}

impl<S> Layer<S> for KnownVersions {
    type Service = NotOlder<S>;

    fn layer(&self, inner: S) -> NotOlder<S> {
        NotOlder { inner, known: self.clone() }
    }
}

pub(super) struct NotOlder<S> {
    inner: S,
    known: KnownVersions,
}

impl<S, B> Service<Request<B>> for NotOlder<S>
where
    S: Service<Request<B>>,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = S::Future;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, mut request: Request<B>) -> Self::Future {
        if let Some(uri) = self.known.pass(request.uri()) {
            *request.uri_mut() = uri;
        }
        self.inner.call(request)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_is_not_older_than_the_last_watch() {
        let known = KnownVersions::default();
        let pass = |uri: &str| known.pass(&uri.parse().unwrap()).map(|uri| uri.to_string());
        let list = "/api/v1/services?&resourceVersion=0&resourceVersionMatch=NotOlderThan";
        assert_eq!(pass(list), None, "nothing is known yet");
        assert_eq!(pass("/api/v1/services?&watch=true&resourceVersion=0&sendInitialEvents=true"), None);
        assert_eq!(pass("/api/v1/services?watch=true&resourceVersion=41"), None);
        assert_eq!(pass("/api/v1/services?watch=true&resourceVersion=42"), None);
        let not_older = "/api/v1/services?&resourceVersion=42&resourceVersionMatch=NotOlderThan";
        assert_eq!(pass(list).as_deref(), Some(not_older));
        assert_eq!(
            pass("/api/v1/services?watch=true&resourceVersion=0&sendInitialEvents=true").as_deref(),
            Some("/api/v1/services?watch=true&resourceVersion=42&sendInitialEvents=true")
        );
        assert_eq!(pass("/api/v1/nodes?&resourceVersion=0"), None, "another kind");
        // What came in the middle of a watch.
        known.note("/api/v1/services", "50");
        known.note_at_least("/api/v1/services", 49);
        assert!(pass(list).unwrap().contains("resourceVersion=50&"));
        known.note_at_least("/api/v1/services", 51);
        assert!(pass(list).unwrap().contains("resourceVersion=51&"));
        assert_eq!(pass("/api/v1/services?&limit=500"), None, "what etcd holds");
        // An API server that was restored from a backup: versions begin anew.
        assert_eq!(pass("/api/v1/services?watch=true&resourceVersion=7"), None);
        assert!(pass(list).unwrap().contains("resourceVersion=7&"));
    }
}
