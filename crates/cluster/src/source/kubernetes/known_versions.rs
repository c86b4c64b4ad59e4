//! Lists from the API server's cache that are not older than what is already known.
//!
//! The minimum version of a list is the one with which a watch of the same path last began, or that
//! of the last object that it delivered: the API server waits until its cache has that version, or
//! refuses.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    task::{Context, Poll},
};

use hyper::{Request, Uri};
use tower::{Layer, Service};

/// The query parameter of a request for which any version will do.
const ANY: &str = "resourceVersion=0";

/// The resourceVersion up to which the objects of a URL path are known. Clones share one state.
#[derive(Clone, Debug, Default)]
pub(super) struct KnownVersions(Arc<Mutex<HashMap<String, String>>>);

impl KnownVersions {
    /// Notes the version of an object that a watch of this path delivered: it may be far beyond the
    /// version with which the watch began.
    pub(super) fn note(&self, path: &str, version: &str) {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        known.insert(path.to_owned(), version.to_owned());
    }

    /// Notes the newest version among the objects of a list of this path. The known version may be
    /// newer: that of an object that has been deleted since.
    pub(super) fn note_at_least(&self, path: &str, version: u64) {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let older = known.get(path).is_none_or(|known| known.parse().is_ok_and(|known: u64| known < version));
        if older {
            known.insert(path.to_owned(), version.to_string());
        }
    }

    /// Notes the version with which a watch begins. Returns the URI to request instead, if any
    /// version would do and one is known.
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
        // The version of objects that came in the middle of a watch.
        known.note("/api/v1/services", "50");
        known.note_at_least("/api/v1/services", 49);
        assert!(pass(list).unwrap().contains("resourceVersion=50&"));
        known.note_at_least("/api/v1/services", 51);
        assert!(pass(list).unwrap().contains("resourceVersion=51&"));
        assert_eq!(pass("/api/v1/services?&limit=500"), None, "what etcd holds");
        // An API server that was restored from a backup: versions start again.
        assert_eq!(pass("/api/v1/services?watch=true&resourceVersion=7"), None);
        assert!(pass(list).unwrap().contains("resourceVersion=7&"));
    }
}
