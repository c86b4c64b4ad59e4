//! One reading of a folder of manifests: all of it is understood, or every mistake is named.

mod text;

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
};

use k8s_openapi::api::{
    coordination::v1::Lease,
    core::v1::{Node, Service},
    discovery::v1::EndpointSlice,
    networking::v1::ServiceCIDR,
};
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::value::RawValue;
use serde_yaml_ng::Value;
use tracing::debug;

use crate::{
    model::{ServiceName, object},
    source::batch::{Batch, Change, Update},
    source::convert::{
        self, Author, FieldError,
        detail::{self, Detail},
    },
};

#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Objects {
    pub(super) services: Vec<object::Service>,
    pub(super) slices: Vec<object::EndpointSlice>,
    pub(super) nodes: Vec<object::Node>,
    pub(super) service_cidrs: Vec<object::ServiceCidr>,
    pub(super) direct_nodes: Vec<object::DirectNode>,
}

impl Objects {
    /// Returns a batch that replaces all objects by these.
    pub(super) fn batch(self) -> Batch {
        fn all<T>(objects: Vec<T>) -> Change<T> {
            Change::Reset { objects, unreadable: Vec::new() }
        }
        Batch(vec![
            Update::Node(all(self.nodes)),
            Update::ServiceCidr(all(self.service_cidrs)),
            Update::Direct(all(self.direct_nodes)),
            Update::Service(all(self.services)),
            Update::EndpointSlice(all(self.slices)),
            Update::Synced,
        ])
    }

    /// Logs unknown fields: most often they are typing errors, but they may belong to a newer API,
    /// so they are not mistakes.
    fn tell_unknown_fields(&mut self, name: &ServiceName, kind: &str, fields: &[String]) {
        let problems = match kind {
            "Service" => {
                self.services.last_mut().filter(|last| last.name == *name).map(|last| &mut last.problems)
            }
            "EndpointSlice" => {
                self.slices.last_mut().filter(|last| last.name == *name).map(|last| &mut last.problems)
            }
            _ => None,
        };
        if let Some(problems) = problems {
            problems
                .extend(fields.iter().map(|field| format!("{kind} {name}: {field} is not a known field.")));
        }
    }
}

/// Mistakes in a folder, one line each: file, document, field, problem.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}", .0.join("; "))]
pub struct Mistakes(pub Vec<String>);

/// Returns the manifests in `folder`, in order of their names. Sub-folders and hidden files (those
/// of editors, and the `..data` of a mounted ConfigMap) are skipped; symbolic links are followed.
pub(super) fn files(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        let hidden = path.file_name().is_none_or(|name| name.as_encoded_bytes().starts_with(b"."));
        let extension = path.extension().and_then(|extension| extension.to_str());
        if !hidden && matches!(extension, Some("yaml" | "yml" | "json")) && !path.is_dir() {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

pub(super) fn load(folder: &Path, detail: Detail) -> Result<Objects, Mistakes> {
    let files = files(folder).map_err(|error| Mistakes(vec![format!("{}: {error}", folder.display())]))?;
    let mut loader =
        Loader { detail, objects: Objects::default(), mistakes: Vec::new(), found: BTreeMap::new() };
    for file in files {
        let name = file.file_name().unwrap_or(file.as_os_str()).to_string_lossy().into_owned();
        match text::read(&file) {
            Ok(text) => loader.file(&name, &text),
            // The file was removed after the folder was listed: that change is announced, and the
            // next reading sees the rest.
            Err(error) if error.kind() == io::ErrorKind::NotFound && !file.is_symlink() => {}
            Err(error) => loader.mistakes.push(format!("{name}: {error}")),
        }
    }
    if loader.mistakes.is_empty() { Ok(loader.objects) } else { Err(Mistakes(loader.mistakes)) }
}

struct Loader {
    detail: Detail,
    objects: Objects,
    mistakes: Vec<String>,
    /// The file of each object, by kind and name.
    found: BTreeMap<String, String>,
}

impl Loader {
    fn file(&mut self, name: &str, text: &str) {
        if name.ends_with(".json") && self.json(&format!("{name}, document 1"), text) {
            return;
        }
        for (i, document) in serde_yaml_ng::Deserializer::from_str(text).enumerate() {
            let place = format!("{name}, document {}", i + 1);
            match Value::deserialize(document) {
                Ok(Value::Null) => {}
                Ok(value) => self.document(&place, "", value),
                Err(error) => {
                    self.mistakes.push(format!("{place}: {error}"));
                    // The parser cannot continue after a syntax error.
                    return;
                }
            }
        }
    }

    /// Reads a text as JSON, which is faster than YAML. Returns whether it is JSON: anything else,
    /// and its mistakes, is left to the YAML parser.
    fn json(&mut self, place: &str, text: &str) -> bool {
        if let Ok(list) = serde_json::from_str::<JsonList<'_>>(text)
            && let Some(item_kind) = item_kind(&list.kind)
        {
            for (i, item) in list.items.iter().enumerate() {
                match serde_json::from_str(item.get()) {
                    Ok(item) => self.item(place, &format!("items[{i}]."), item, &list.api_version, item_kind),
                    Err(error) => self.mistakes.push(format!("{place}: items[{i}]: {error}")),
                }
            }
            return true;
        }
        let Ok(value @ Value::Mapping(_)) = serde_json::from_str::<Value>(text) else { return false };
        self.document(place, "", value);
        true
    }

    /// Reads one document. `prefix` is the path of the object within the document: empty, or such
    /// as `items[2].`.
    fn document(&mut self, place: &str, prefix: &str, value: Value) {
        let text = |key: &str| value.get(key).and_then(Value::as_str).unwrap_or_default().to_owned();
        let (api_version, kind) = (text("apiVersion"), text("kind"));
        if let Some(item_kind) = item_kind(&kind) {
            self.list(place, prefix, &value, &api_version, item_kind);
            return;
        }
        let detail = self.detail;
        let result = match (api_version.as_str(), kind.as_str()) {
            ("v1", "Service") => self.object(place, &kind, value, |objects, service: &Service| {
                objects.services.extend(detail::service(service, Author::Person, detail)?);
                convert::name(&service.metadata)
            }),
            ("discovery.k8s.io/v1", "EndpointSlice") => {
                self.object(place, &kind, value, |objects, slice: &EndpointSlice| {
                    objects.slices.extend(detail::endpoint_slice(slice, detail)?);
                    convert::name(&slice.metadata)
                })
            }
            ("v1", "Node") => self.object(place, &kind, value, |objects, node: &Node| {
                objects.nodes.push(detail::node(node, detail)?);
                convert::name(&node.metadata)
            }),
            ("coordination.k8s.io/v1", "Lease") => {
                self.object(place, &kind, value, |objects, lease: &Lease| {
                    objects.direct_nodes.extend(convert::direct(lease)?);
                    convert::name(&lease.metadata)
                })
            }
            // Both versions have the same fields.
            ("networking.k8s.io/v1" | "networking.k8s.io/v1beta1", "ServiceCIDR") => {
                self.object(place, &kind, value, |objects, object: &ServiceCIDR| {
                    objects.service_cidrs.push(convert::service_cidr(object)?);
                    convert::name(&object.metadata)
                })
            }
            (old, "EndpointSlice") if old.is_empty() || old.starts_with("discovery.k8s.io/") => {
                Err(mistake("apiVersion", &format!("{old:?} is not read, write discovery.k8s.io/v1")))
            }
            (old, "ServiceCIDR") => {
                Err(mistake("apiVersion", &format!("{old:?} is not read, write networking.k8s.io/v1")))
            }
            ("", "Service" | "Node") => Err(mistake("apiVersion", "missing, write v1")),
            (_, "") => Err(mistake("kind", "missing")),
            _ => {
                debug!("{place}: {kind} of {api_version} is not read");
                Ok(())
            }
        };
        if let Err(FieldError { path, message }) = result {
            self.mistakes.push(format!("{place}: {prefix}{path}: {message}"));
        }
    }

    fn list(&mut self, place: &str, prefix: &str, list: &Value, api_version: &str, item_kind: &str) {
        let Some(items) = list.get("items").and_then(Value::as_sequence) else {
            self.mistakes.push(format!("{place}: {prefix}items: missing, or not a list"));
            return;
        };
        for (i, item) in items.iter().enumerate() {
            self.item(place, &format!("{prefix}items[{i}]."), item.clone(), api_version, item_kind);
        }
    }

    /// Reads an item of a list. Items of a typed list may leave out what the list specifies.
    fn item(&mut self, place: &str, prefix: &str, mut item: Value, api_version: &str, item_kind: &str) {
        if let Value::Mapping(fields) = &mut item
            && !item_kind.is_empty()
        {
            fields.entry("kind".into()).or_insert_with(|| item_kind.into());
            fields.entry("apiVersion".into()).or_insert_with(|| api_version.into());
        }
        self.document(place, prefix, item);
    }

    fn object<T: DeserializeOwned>(
        &mut self,
        place: &str,
        kind: &str,
        value: Value,
        add: impl FnOnce(&mut Objects, &T) -> Result<ServiceName, FieldError>,
    ) -> Result<(), FieldError> {
        let mut unknown = Vec::new();
        let mut note = |path: serde_ignored::Path<'_>| unknown.push(field_path(&path));
        let object: T = serde_path_to_error::deserialize(serde_ignored::Deserializer::new(value, &mut note))
            .map_err(|error| {
                let path = error.path().to_string();
                mistake(&path, &error.into_inner().to_string())
            })?;
        let name = add(&mut self.objects, &object)?;
        self.objects.tell_unknown_fields(&name, kind, &unknown);
        let of_the_cluster = matches!(kind, "Node" | "ServiceCIDR");
        let name = if of_the_cluster { format!("{kind} {}", name.name) } else { format!("{kind} {name}") };
        match self.found.insert(name.clone(), place.to_owned()) {
            Some(first) => Err(mistake("metadata.name", &format!("{name} is also in {first}"))),
            None => Ok(()),
        }
    }
}

/// A list in JSON. Its items are parsed one by one: as a whole they would take many times the size
/// of the file.
#[derive(Deserialize)]
struct JsonList<'t> {
    #[serde(rename = "apiVersion", default)]
    api_version: String,
    kind: String,
    #[serde(borrow)]
    items: Vec<&'t RawValue>,
}

/// Returns the kind of the items of a list: a kind that is read, or empty for any.
fn item_kind(list: &str) -> Option<&str> {
    let item = list.strip_suffix("List")?;
    matches!(item, "" | "Service" | "EndpointSlice" | "Node" | "ServiceCIDR" | "Lease").then_some(item)
}

/// Formats a path such as `spec.ports[0].port`.
fn field_path(path: &serde_ignored::Path<'_>) -> String {
    use serde_ignored::Path;
    match path {
        Path::Root => String::new(),
        Path::Seq { parent, index } => format!("{}[{index}]", field_path(parent)),
        Path::Map { parent, key } => {
            let parent = field_path(parent);
            if parent.is_empty() { key.clone() } else { format!("{parent}.{key}") }
        }
        Path::Some { parent } | Path::NewtypeStruct { parent } | Path::NewtypeVariant { parent } => {
            field_path(parent)
        }
    }
}

fn mistake(path: &str, message: &str) -> FieldError {
    FieldError { path: path.to_owned(), message: message.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load_text(text: &str) -> Result<Objects, Mistakes> {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("a.yaml"), text).unwrap();
        load(folder.path(), Detail::Proxy)
    }

    fn mistake_in(text: &str) -> String {
        load_text(text).unwrap_err().to_string()
    }

    const WEB: &str = "apiVersion: v1\nkind: Service\nmetadata: {name: web}\n\
                       spec: {clusterIP: 10.96.0.1, ports: [{port: 80}]}\n";

    #[test]
    fn several_documents_and_lists() {
        let list = "---\n---\nkind: List\napiVersion: v1\nitems:\n- {apiVersion: v1, kind: Node, metadata: {name: n}}\n\
                    ---\nkind: ServiceList\napiVersion: v1\nitems:\n- metadata: {name: db, namespace: x}\n  spec: {clusterIP: 10.96.0.2}\n\
                    ---\nkind: LeaseList\napiVersion: coordination.k8s.io/v1\nitems:\n\
                    - metadata: {name: traffic-policy-opens-n, labels: {traffic-policy.io/opens: ipip}, annotations: {traffic-policy.io/opens-from: 10.0.0.1}}\n\
                    \x20 spec: {holderIdentity: n}\n\
                    ---\nkind: Service\napiVersion: serving.knative.dev/v1\nmetadata: {name: other}\n";
        let objects = load_text(&format!("{WEB}{list}")).unwrap();
        let names: Vec<_> = objects.services.iter().map(|service| service.name.to_string()).collect();
        assert_eq!(names, ["default/web", "x/db"]);
        assert_eq!((objects.nodes.len(), objects.direct_nodes.len()), (1, 1));
    }

    #[test]
    fn json_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let json = r#"{"apiVersion":"v1","kind":"Service","metadata":{"name":"web"},"spec":{"clusterIP":"10.96.0.1"}}"#;
        fs::write(folder.path().join("a.json"), json).unwrap();
        fs::write(folder.path().join("list.json"), r#"{"apiVersion":"v1","kind":"NodeList","items":[{"metadata":{"name":"n"}},{"metadata":{"name":"m"}}]}"#).unwrap();
        fs::write(folder.path().join(".a.json.swp.yaml"), "{").unwrap();
        fs::write(folder.path().join("notes.txt"), "{").unwrap();
        let objects = load(folder.path(), Detail::Proxy).unwrap();
        assert_eq!((objects.services.len(), objects.nodes.len()), (1, 2));

        let bad =
            r#"{"apiVersion":"v1","kind":"NodeList","items":[{"metadata":{"name":"n"}},{"metadata":{}}]}"#;
        fs::write(folder.path().join("list.json"), bad).unwrap();
        assert_eq!(
            load(folder.path(), Detail::Proxy).unwrap_err().to_string(),
            "list.json, document 1: items[1].metadata.name: missing"
        );
        fs::write(folder.path().join("list.json"), "{\"kind\": [").unwrap();
        let message = load(folder.path(), Detail::Proxy).unwrap_err().to_string();
        assert!(message.starts_with("list.json, document 1: "), "{message}");
    }

    #[test]
    fn a_mistake_is_named_with_document_and_field() {
        let text = format!("{WEB}---\n{}", WEB.replace("80", "eighty").replace("web", "db"));
        let message = mistake_in(&text);
        assert!(message.starts_with("a.yaml, document 2: spec.ports[0].port: "), "{message}");

        let text = WEB.replace("spec: {", "spec: {externalTrafficPolicy: local, ");
        assert_eq!(
            mistake_in(&text),
            "a.yaml, document 1: spec.externalTrafficPolicy: unknown value \"local\", expected Cluster or Local"
        );
        let text = WEB.replace("80", "70000");
        assert_eq!(mistake_in(&text), "a.yaml, document 1: spec.ports[0].port: 70000 is not a port");
        let text = WEB.replace("{name: web}", "{}");
        assert_eq!(mistake_in(&text), "a.yaml, document 1: metadata.name: missing");
    }

    #[test]
    fn ports_without_names_of_their_own_are_refused() {
        let with = |ports: &str| WEB.replace("[{port: 80}]", ports);
        assert_eq!(
            mistake_in(&with("[{port: 80}, {port: 443}]")),
            "a.yaml, document 1: spec.ports[1].name: it has no name, as spec.ports[0]: ports of one protocol need names of \
             their own"
        );
        assert!(
            mistake_in(&with("[{name: a, port: 80}, {name: a, port: 443}]"))
                .contains("\"a\", as spec.ports[0]")
        );
        let both = with("[{port: 53, protocol: UDP}, {port: 53, protocol: TCP}]");
        assert_eq!(load_text(&both).unwrap().services[0].ports.len(), 2);
    }

    #[test]
    fn a_drain_has_an_end() {
        let with = |time: &str| {
            WEB.replace(
                "{name: web}",
                &format!("{{name: web, annotations: {{traffic-policy.io/drain: {time}}}}}"),
            )
        };
        let service = load_text(&with("18446744073709ms")).unwrap().services.remove(0);
        assert_eq!(service.drain, Some(std::time::Duration::from_secs(24 * 3600)));
        assert!(service.problems[0].contains("longer than 24h"), "{:?}", service.problems);
        assert_eq!(load_text(&with("24h")).unwrap().services[0].problems, [""; 0]);
    }

    #[test]
    fn empty_lists_may_be_null() {
        let text = "apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\naddressType: IPv4\nendpoints: null\n\
                    ports: null\nmetadata: {name: web-1, labels: {kubernetes.io/service-name: web}}\n";
        assert_eq!(load_text(text).unwrap().slices.len(), 1);
    }

    #[test]
    fn unknown_fields_are_told() {
        let text = WEB
            .replace("spec: {", "spec: {externalTraficPolicy: Local, ")
            .replace("port: 80", "port: 80, nodeport: 1");
        assert_eq!(
            load_text(&text).unwrap().services[0].problems,
            [
                "Service default/web: spec.externalTraficPolicy is not a known field.",
                "Service default/web: spec.ports[0].nodeport is not a known field.",
            ]
        );
    }

    #[test]
    fn a_syntax_error_is_named_with_its_line() {
        let message = mistake_in(&format!("{WEB}---\nkind: [\n"));
        assert!(message.starts_with("a.yaml, document 2: "), "{message}");
        assert!(message.contains("line"), "{message}");
    }

    #[test]
    fn an_object_given_twice_is_a_mistake() {
        assert_eq!(
            mistake_in(&format!("{WEB}---\n{WEB}")),
            "a.yaml, document 2: metadata.name: Service default/web is also in a.yaml, document 1"
        );
    }

    #[test]
    fn all_mistakes_are_told() {
        let text = format!("{}---\n{}", WEB.replace("80", "0"), WEB.replace("80", "-1").replace("web", "db"));
        assert_eq!(load_text(&text).unwrap_err().0.len(), 2);
    }
}
