//! `--config`: a file in `kubeproxy.config.k8s.io/v1alpha1`. Its values become the defaults of
//! flags, so that flags and their environment variables take precedence.

pub mod fields;

use std::{
    fmt, fs,
    net::{IpAddr, SocketAddr},
    path::{Path, PathBuf},
    str::FromStr as _,
};

use serde_yaml_ng::{Mapping, Value};
use traffic_policy_cluster::model::parse_duration;

use self::fields::{FIELDS, Field, Kind, Meaning, TYPE};
use crate::controller::NodePortAddresses;

const API_VERSION: &str = "kubeproxy.config.k8s.io/v1alpha1";
const KIND: &str = "KubeProxyConfiguration";
/// The longest accepted file in bytes; a file of kube-proxy has about two thousand.
const LONGEST: u64 = 1 << 20;
/// Minimum similarity of two names for one to be suggested for the other; 1 means equal.
const ALIKE: f64 = 0.85;

/// Content of a file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ConfigFile {
    pub path: PathBuf,
    /// The text as read, for detecting changes.
    pub text: String,
    /// Values of flags, by their ids on the command line.
    pub values: Vec<(&'static str, String)>,
    /// Fields that are not applied.
    pub notes: Vec<Note>,
}

/// A message about a field that is not applied.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Note {
    /// kube-proxy knows the field, but it has no effect here.
    Ignored { path: &'static str, value: String, why: &'static str },
    /// The field is unknown.
    Unknown { path: String, meant: Option<&'static str> },
    /// A default that differs from kube-proxy's.
    NodePorts,
}

impl fmt::Display for Note {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ignored { path, value, why } => write!(f, "{path}: {value} is not applied: {why}"),
            Self::Unknown { path, meant: Some(meant) } => {
                write!(f, "{path} is unknown, and ignored: is {meant} meant?")
            }
            Self::Unknown { path, meant: None } => write!(f, "{path} is unknown, and ignored"),
            Self::NodePorts => f.write_str(
                "nodePortAddresses is not set: node ports answer on the Node's addresses (primary), as in kube-proxy's mode \
                 nftables; its mode iptables has them on all, which nodePortAddresses: [all] or --node-port-addresses all asks for",
            ),
        }
    }
}

/// A file that cannot be used, with the field, the fault, and the remedy.
#[derive(Debug, thiserror::Error)]
#[error("{}: {problem}", path.display())]
pub struct ConfigFileError {
    path: PathBuf,
    problem: String,
}

/// Reads a file.
pub fn read(path: &Path) -> Result<ConfigFile, ConfigFileError> {
    let wrap = |problem| ConfigFileError { path: path.to_owned(), problem };
    let text = text(path).map_err(wrap)?;
    let (values, notes) = parse(&text).map_err(wrap)?;
    Ok(ConfigFile { path: path.to_owned(), text, values, notes })
}

/// Returns the text of a file.
pub fn text(path: &Path) -> Result<String, String> {
    let advice = "name a file that the agent's user may read with --config (TRAFFIC_POLICY_CONFIG)";
    let size = fs::metadata(path).map_err(|error| format!("{error}: {advice}"))?.len();
    if size > LONGEST {
        return Err(format!("{size} bytes are no configuration of kube-proxy's: {advice}"));
    }
    fs::read_to_string(path).map_err(|error| format!("{error}: {advice}"))
}

type Parsed = (Vec<(&'static str, String)>, Vec<Note>);

fn parse(text: &str) -> Result<Parsed, String> {
    let document: Value = serde_yaml_ng::from_str(text)
        .map_err(|error| format!("{error}: write one YAML document of kind {KIND}"))?;
    let Value::Mapping(document) = document else {
        return Err(format!("no YAML mapping: write apiVersion: {API_VERSION}, kind: {KIND}, and fields"));
    };
    is_ours(&document)?;
    let mut reader = Reader::default();
    reader.mapping("", &document)?;
    let is_nftables = document.get("mode").and_then(Value::as_str) == Some("nftables");
    if !is_nftables && reader.values.iter().all(|(id, _)| *id != "node_port_addresses") {
        reader.notes.push(Note::NodePorts);
    }
    Ok((reader.values, reader.notes))
}

fn is_ours(document: &Mapping) -> Result<(), String> {
    let [version, kind] = TYPE.map(|name| document.get(name).and_then(Value::as_str).unwrap_or_default());
    if kind == "ConfigMap" {
        return Err(format!(
            "a ConfigMap: give what it has as config.conf, kind {KIND} (kubectl -n kube-system get configmap kube-proxy \
             -o jsonpath='{{.data.config\\.conf}}')"
        ));
    }
    if (version, kind) != (API_VERSION, KIND) {
        return Err(format!(
            "apiVersion {version:?}, kind {kind:?} is not what --config takes: write apiVersion: {API_VERSION}, kind: {KIND}"
        ));
    }
    Ok(())
}

#[derive(Default)]
struct Reader {
    values: Vec<(&'static str, String)>,
    notes: Vec<Note>,
}

impl Reader {
    /// Reads the fields of a mapping whose own path, followed by a dot, is `prefix`.
    fn mapping(&mut self, prefix: &str, mapping: &Mapping) -> Result<(), String> {
        for (name, value) in mapping {
            let path = match name {
                Value::String(name) => format!("{prefix}{name}"),
                other => format!("{prefix}{}", shown(other)),
            };
            if TYPE.contains(&path.as_str()) {
                continue;
            }
            let within = format!("{path}.");
            if let Some(field) = FIELDS.iter().find(|field| field.path == path) {
                self.field(field, value)?;
            } else if FIELDS.iter().any(|field| field.path.starts_with(&within)) {
                match value {
                    Value::Null => {}
                    Value::Mapping(mapping) => self.mapping(&within, mapping)?,
                    other => {
                        return Err(format!("{path} is {}: write a mapping, or leave it out", shown(other)));
                    }
                }
            } else {
                let meant = meant(&path);
                self.notes.push(Note::Unknown { path, meant });
            }
        }
        Ok(())
    }

    fn field(&mut self, field: &Field, value: &Value) -> Result<(), String> {
        match field.meaning {
            Meaning::Flag(id, kind) => {
                let read = read_value(kind, value).map_err(|fix| {
                    format!(
                        "{} is {}, which cannot be used: {fix}, or leave it out",
                        field.path,
                        shown(value)
                    )
                })?;
                self.values.extend(read.map(|value| (id, value)));
            }
            Meaning::Ignored { why, ordinary } => {
                let value = shown(value);
                let is_ordinary = ordinary.contains(&value.trim_matches('"'));
                // Where kube-proxy's default is true, false is a request.
                let asks = value == "false" && ordinary.contains(&"true");
                if asks || !is_ordinary && !is_empty(&value) {
                    self.notes.push(Note::Ignored { path: field.path, value, why });
                }
            }
        }
        Ok(())
    }
}

/// Whether a value requests nothing: kubeadm writes all fields out.
fn is_empty(shown: &str) -> bool {
    ["null", "\"\"", "0", "false", "\"0s\"", "\"0\"", "[]", "{}", "0.0"].contains(&shown)
}

/// Returns the known field that is most similar to this one.
fn meant(path: &str) -> Option<&'static str> {
    let last = |path: &str| path.rsplit('.').next().unwrap_or_default().to_lowercase();
    // A correct name at the wrong place, or a name that is nearly correct.
    let likeness = |field: &Field| {
        strsim::jaro_winkler(&field.path.to_lowercase(), &path.to_lowercase())
            .max(strsim::jaro_winkler(&last(field.path), &last(path)) - 0.01)
    };
    let (field, best) =
        FIELDS.iter().map(|field| (field, likeness(field))).max_by(|(_, a), (_, b)| a.total_cmp(b))?;
    (best >= ALIKE).then_some(field.path)
}

/// Returns a value in one line, as JSON writes it.
fn shown(value: &Value) -> String {
    serde_json::to_string(value).unwrap_or_else(|_| "no JSON value".to_owned())
}

/// Returns the value for a flag, or `None` if the field sets nothing. The error states what to
/// write.
fn read_value(kind: Kind, value: &Value) -> Result<Option<String>, String> {
    match kind {
        Kind::NodeName => {
            // kube-proxy does the same.
            let name =
                text_of(value, "the name of this node's Node object")?.map(|name| name.trim().to_lowercase());
            Ok(name.filter(|name| !name.is_empty()))
        }
        Kind::Path => text_of(value, "the path of a kubeconfig"),
        Kind::Address(port) => {
            let fix = format!("write an IP address and a port, such as 0.0.0.0:{port} or [::]:{port}");
            let Some(text) = text_of(value, &format!("an address such as 0.0.0.0:{port}"))? else {
                return Ok(None);
            };
            let address = SocketAddr::from_str(&text)
                .or_else(|_| text.parse::<IpAddr>().map(|address| SocketAddr::new(address, port)));
            address.map(|address| Some(address.to_string())).map_err(|_| fix)
        }
        Kind::NodePortAddresses => node_port_addresses(value),
        Kind::Time => {
            let fix = "a time in quotes such as 30s, 2m or 24h0m0s";
            let Some(text) = text_of(value, fix)? else { return Ok(None) };
            match parse_duration(&text) {
                Some(time) if time.is_zero() => Ok(None),
                Some(_) => Ok(Some(text)),
                None => Err(format!("write {fix}")),
            }
        }
        Kind::LogFormat => match text_of(value, "text or json")? {
            None => Ok(None),
            Some(format) if ["text", "json"].contains(&format.as_str()) => Ok(Some(format)),
            Some(_) => Err("write text or json".to_owned()),
        },
        Kind::Verbosity => match value {
            Value::Null => Ok(None),
            Value::Number(number) => match number.as_u64() {
                // klog's levels are used like this: up to 3 for operators, 4 for debugging, 5 for
                // tracing.
                Some(0) => Ok(None),
                Some(1..=3) => Ok(Some("info".to_owned())),
                Some(4..=5) => Ok(Some("debug".to_owned())),
                Some(_) => Ok(Some("trace".to_owned())),
                None => Err("write a number from 0".to_owned()),
            },
            _ => Err("write a number from 0".to_owned()),
        },
    }
}

fn text_of(value: &Value, what: &str) -> Result<Option<String>, String> {
    match value {
        Value::Null => Ok(None),
        Value::String(text) if text.is_empty() => Ok(None),
        Value::String(text) => Ok(Some(text.clone())),
        _ => Err(format!("write {what}")),
    }
}

fn node_port_addresses(value: &Value) -> Result<Option<String>, String> {
    let fix = "write a list of CIDRs such as [192.0.2.0/24], or [primary], [all], [localhost]";
    let items = match value {
        Value::Null => return Ok(None),
        Value::Sequence(items) => items.iter().map(Value::as_str).collect::<Option<Vec<_>>>(),
        _ => None,
    };
    let items = items.ok_or(fix)?;
    if items.iter().any(|item| item.contains(',') || NodePortAddresses::from_str(item).is_err()) {
        return Err(fix.to_owned());
    }
    Ok((!items.is_empty()).then(|| items.join(",")))
}

#[cfg(test)]
mod tests;
