//! The objects of the server, and the history that watches read.

use std::collections::BTreeMap;

use serde_json::{Value, json};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    Service,
    EndpointSlice,
    Node,
    ServiceCidr,
    Lease,
}

impl Kind {
    const ALL: [Self; 5] = [Self::Service, Self::EndpointSlice, Self::Node, Self::ServiceCidr, Self::Lease];

    pub(super) fn of(kind: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|known| known.name() == kind)
    }

    pub(super) fn of_plural(plural: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|known| known.plural() == plural)
    }

    pub(super) fn name(self) -> &'static str {
        self.names().0
    }

    pub(super) fn plural(self) -> &'static str {
        self.names().1
    }

    pub(super) fn api_version(self) -> &'static str {
        self.names().2
    }

    /// Name, plural and version of the API.
    fn names(self) -> (&'static str, &'static str, &'static str) {
        match self {
            Self::Service => ("Service", "services", "v1"),
            Self::EndpointSlice => ("EndpointSlice", "endpointslices", "discovery.k8s.io/v1"),
            Self::Node => ("Node", "nodes", "v1"),
            Self::ServiceCidr => ("ServiceCIDR", "servicecidrs", "networking.k8s.io/v1"),
            Self::Lease => ("Lease", "leases", "coordination.k8s.io/v1"),
        }
    }

    /// Whether objects of this kind have a namespace; those of the cluster have none.
    fn has_namespace(self) -> bool {
        matches!(self, Self::Service | Self::EndpointSlice | Self::Lease)
    }
}

type Key = (Kind, String, String);

#[derive(Debug, Default)]
pub(super) struct Store {
    version: u64,
    objects: BTreeMap<Key, Value>,
    history: Vec<Entry>,
    /// The oldest version from which a watch can continue.
    compacted: u64,
}

#[derive(Debug)]
struct Entry {
    version: u64,
    /// The kind, and the object before and after the change; `None` for a bookmark.
    change: Option<(Kind, Option<Value>, Option<Value>)>,
}

/// The objects that a request selects.
#[derive(Clone, Debug, Default)]
pub(super) struct Selection {
    pub(super) namespace: Option<String>,
    /// The `metadata.name` of a field selector.
    pub(super) name: Option<String>,
    /// Labels that must be there, as in `key`.
    pub(super) having: Vec<String>,
    /// Labels that must be absent, as in `!key`.
    pub(super) without: Vec<String>,
    /// Labels that must have a value, as in `key=value`.
    pub(super) with: Vec<(String, String)>,
}

impl Selection {
    fn takes(&self, object: &Value) -> bool {
        let metadata = &object["metadata"];
        let is = |wanted: &Option<String>, field: &str| {
            wanted.as_ref().is_none_or(|wanted| metadata[field].as_str() == Some(wanted))
        };
        is(&self.namespace, "namespace")
            && is(&self.name, "name")
            && self.having.iter().all(|label| metadata["labels"].get(label).is_some())
            && !self.without.iter().any(|label| metadata["labels"].get(label).is_some())
            && self.with.iter().all(|(label, value)| metadata["labels"][label] == **value)
    }
}

/// The history before the requested version is gone.
#[derive(Debug)]
pub(super) struct Gone;

impl Store {
    pub(super) fn version(&self) -> u64 {
        self.version
    }

    pub(super) fn apply(&mut self, kind: Kind, mut object: Value) {
        self.version += 1;
        object["metadata"]["resourceVersion"] = self.version.to_string().into();
        if kind.has_namespace() && object["metadata"]["namespace"].is_null() {
            object["metadata"]["namespace"] = "default".into();
        }
        let text = |field: &str| object["metadata"][field].as_str().unwrap_or_default().to_owned();
        let key = (kind, text("namespace"), text("name"));
        if object["metadata"]["uid"].is_null() {
            object["metadata"]["uid"] = format!("uid-of-{}", key.2).into();
        }
        let old = self.objects.insert(key, object.clone());
        self.history.push(Entry { version: self.version, change: Some((kind, old, Some(object))) });
    }

    pub(super) fn get(&self, kind: Kind, namespace: &str, name: &str) -> Option<Value> {
        self.objects.get(&(kind, namespace.to_owned(), name.to_owned())).cloned()
    }

    pub(super) fn delete(&mut self, kind: Kind, namespace: &str, name: &str) {
        let Some(old) = self.objects.remove(&(kind, namespace.to_owned(), name.to_owned())) else { return };
        self.version += 1;
        self.history.push(Entry { version: self.version, change: Some((kind, Some(old), None)) });
    }

    pub(super) fn bookmark(&mut self) {
        self.version += 1;
        self.history.push(Entry { version: self.version, change: None });
    }

    pub(super) fn compact(&mut self) {
        self.compacted = self.version;
        self.history.clear();
    }

    /// The objects from index `start` on, at most `limit`, and whether there are more.
    pub(super) fn page(
        &self,
        kind: Kind,
        selection: &Selection,
        start: usize,
        limit: usize,
    ) -> (Vec<Value>, bool) {
        let objects = self.objects.iter().filter(|((of, ..), object)| *of == kind && selection.takes(object));
        let mut page: Vec<_> =
            objects.skip(start).take(limit.saturating_add(1)).map(|(_, o)| o.clone()).collect();
        let more = page.len() > limit;
        page.truncate(limit);
        (page, more)
    }

    /// All objects as watch events, followed by the bookmark that ends them.
    pub(super) fn initial_events(&self, kind: Kind, selection: &Selection) -> Vec<Value> {
        let (objects, _) = self.page(kind, selection, 0, usize::MAX);
        let mut events: Vec<_> =
            objects.into_iter().map(|object| json!({"type": "ADDED", "object": object})).collect();
        let mut end = bookmark(kind, self.version);
        end["object"]["metadata"]["annotations"] = json!({"k8s.io/initial-events-end": "true"});
        events.push(end);
        events
    }

    /// The watch events after a version, as a client of this selection sees them, and the version
    /// at which they end.
    pub(super) fn events(
        &self,
        kind: Kind,
        selection: &Selection,
        after: u64,
    ) -> Result<(Vec<Value>, u64), Gone> {
        if after < self.compacted {
            return Err(Gone);
        }
        let events = self.history.iter().filter(|entry| entry.version > after).filter_map(|entry| {
            let Some((of, old, new)) = &entry.change else { return Some(bookmark(kind, entry.version)) };
            if *of != kind {
                return None;
            }
            let old = old.as_ref().filter(|object| selection.takes(object));
            let new = new.as_ref().filter(|object| selection.takes(object));
            let (event_type, object) = match (old, new) {
                (None, None) => return None,
                (None, Some(new)) => ("ADDED", new),
                (Some(_), Some(new)) => ("MODIFIED", new),
                (Some(old), None) => ("DELETED", old),
            };
            let mut object = object.clone();
            object["metadata"]["resourceVersion"] = entry.version.to_string().into();
            Some(json!({"type": event_type, "object": object}))
        });
        Ok((events.collect(), self.version))
    }
}

fn bookmark(kind: Kind, version: u64) -> Value {
    json!({
        "type": "BOOKMARK",
        "object": {
            "kind": kind.name(),
            "apiVersion": kind.api_version(),
            "metadata": {"resourceVersion": version.to_string()},
        },
    })
}
