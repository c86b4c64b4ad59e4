//! The configuration in effect: each setting with its value and the origin of that value. It is
//! logged once, and served as `/configz`.

use std::{
    collections::BTreeMap,
    fmt,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use serde::Serialize;
use serde_json::{Map, Value, json};

/// Source of a setting's value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Source {
    Flag,
    Environment,
    File,
    Default,
}

/// A setting.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Setting {
    /// Name of the flag, such as `--drain`.
    pub flag: String,
    /// The value as written behind the flag; `None`: not set.
    pub value: Option<String>,
    pub source: Source,
    /// The field of KubeProxyConfiguration that also sets it.
    pub field: Option<&'static str>,
}

impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.flag)?;
        if let Some(value) = &self.value {
            write!(f, " {value}")?;
        }
        match self.source {
            Source::Flag => Ok(()),
            Source::Environment => f.write_str(" (environment)"),
            Source::File => f.write_str(" (file)"),
            Source::Default => f.write_str(" (default)"),
        }
    }
}

/// All settings. Cheap to clone; all clones share one state.
#[derive(Clone, Debug, Default)]
pub struct InEffect(Arc<Mutex<Inner>>);

#[derive(Debug, Default)]
struct Inner {
    file: Option<PathBuf>,
    settings: Vec<Setting>,
    /// Sizes of pinned maps, by the flags that would set them.
    sizes: BTreeMap<&'static str, u32>,
    /// Settings that the file has changed since the start, and that only a restart applies.
    waiting: BTreeMap<String, Setting>,
}

impl InEffect {
    #[must_use]
    pub fn new(file: Option<&Path>, settings: Vec<Setting>) -> Self {
        Self(Arc::new(Mutex::new(Inner { file: file.map(Path::to_owned), settings, ..Inner::default() })))
    }

    /// Sets the sizes of the maps: those of an earlier agent keep their sizes.
    pub fn set_sizes(&self, sizes: impl IntoIterator<Item = (&'static str, u32)>) {
        self.inner().sizes = sizes.into_iter().collect();
    }

    /// Returns the settings that differ from what is in effect.
    #[must_use]
    pub fn differences(&self, settings: &[Setting]) -> Vec<Setting> {
        let inner = self.inner();
        settings.iter().filter(|setting| !inner.settings.contains(setting)).cloned().collect()
    }

    /// Records a setting as in effect from now on.
    pub fn apply(&self, setting: Setting) {
        let mut inner = self.inner();
        if let Some(own) = inner.settings.iter_mut().find(|own| own.flag == setting.flag) {
            *own = setting;
        }
    }

    /// Records settings that wait for the next start. Returns whether that is new.
    pub fn wait(&self, settings: impl IntoIterator<Item = Setting>) -> bool {
        let waiting = settings.into_iter().map(|setting| (setting.flag.clone(), setting)).collect();
        let before = std::mem::replace(&mut self.inner().waiting, waiting);
        before != self.inner().waiting
    }

    /// Returns all settings in one line: explicit ones first, then defaults.
    #[must_use]
    pub fn line(&self) -> String {
        let inner = self.inner();
        let set = inner.settings.iter().filter(|setting| setting.value.is_some());
        let (said, defaults): (Vec<_>, Vec<_>) = set.partition(|setting| setting.source != Source::Default);
        let words: Vec<_> = said.into_iter().chain(defaults).map(ToString::to_string).collect();
        words.join(", ")
    }

    /// Returns the body of `/configz`: the fields of KubeProxyConfiguration under kube-proxy's own
    /// name, and all settings.
    #[must_use]
    pub fn json(&self) -> String {
        let inner = self.inner();
        let mut kube_proxy = Map::new();
        for (name, value) in [
            ("apiVersion", "kubeproxy.config.k8s.io/v1alpha1"),
            ("kind", "KubeProxyConfiguration"),
            ("mode", "ebpf"),
        ] {
            kube_proxy.insert(name.to_owned(), value.into());
        }
        let mut settings = Map::new();
        for setting in &inner.settings {
            let mut said = json!({ "value": setting.value, "source": setting.source });
            let size = inner.sizes.get(setting.flag.as_str());
            if let Some(size) = size.filter(|size| Some(size.to_string()) != setting.value) {
                said["in_effect"] = size.to_string().into();
            }
            if let Some(next) = inner.waiting.get(&setting.flag) {
                said["after_restart"] = json!(next.value);
            }
            settings.insert(setting.flag.clone(), said);
            if let (Some(field), Some(value)) = (setting.field, &setting.value) {
                insert(&mut kube_proxy, field, value);
            }
        }
        json!({
            "kubeproxy.config.k8s.io": kube_proxy,
            "traffic-policy": { "file": inner.file, "settings": settings },
        })
        .to_string()
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        // A panic leaves whole settings.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Inserts a value at a path of names separated by dots.
fn insert(object: &mut Map<String, Value>, path: &str, value: &str) {
    match path.split_once('.') {
        Some((name, rest)) => {
            let within = object.entry(name).or_insert_with(|| Map::new().into());
            if let Value::Object(within) = within {
                insert(within, rest, value);
            }
        }
        None => {
            let value = match path {
                "nodePortAddresses" => value.split(',').collect::<Vec<_>>().into(),
                // Log levels are no klog verbosity.
                "verbosity" => return,
                _ => value.into(),
            };
            object.insert(path.to_owned(), value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn setting(flag: &str, value: &str, source: Source, field: Option<&'static str>) -> Setting {
        let (flag, value) = (flag.to_owned(), Some(value.to_owned()).filter(|value| !value.is_empty()));
        Setting { flag, value, source, field }
    }

    fn some() -> InEffect {
        InEffect::new(
            Some(Path::new("/config.conf")),
            vec![
                setting("--drain", "30s", Source::Default, None),
                setting("--flow-entries", "1000", Source::Environment, None),
                setting("--idle-udp", "1m", Source::File, Some("conntrack.udpTimeout")),
                setting("--node-port-addresses", "all", Source::Flag, Some("nodePortAddresses")),
                setting("--kubeconfig", "", Source::Default, Some("clientConnection.kubeconfig")),
            ],
        )
    }

    #[test]
    fn one_line_with_what_was_said_first() {
        assert_eq!(
            some().line(),
            "--flow-entries 1000 (environment), --idle-udp 1m (file), --node-port-addresses all, --drain 30s (default)"
        );
    }

    #[test]
    fn as_kube_proxy_has_it_and_all_settings() {
        let settings = some();
        settings.set_sizes([("--flow-entries", 2000)]);
        let said: Value = serde_json::from_str(&settings.json()).unwrap();
        let kube_proxy = &said["kubeproxy.config.k8s.io"];
        assert_eq!(kube_proxy["conntrack"], json!({"udpTimeout": "1m"}));
        assert_eq!(kube_proxy["nodePortAddresses"], json!(["all"]));
        assert!(kube_proxy.get("clientConnection").is_none());
        let own = &said["traffic-policy"];
        assert_eq!(own["file"], "/config.conf");
        assert_eq!(own["settings"]["--drain"], json!({"value": "30s", "source": "default"}));
        let sizes = json!({"value": "1000", "source": "environment", "in_effect": "2000"});
        assert_eq!(own["settings"]["--flow-entries"], sizes, "pinned maps keep their sizes");
    }

    #[test]
    fn what_changes_is_applied_or_waits() {
        let settings = some();
        let udp = setting("--idle-udp", "2m", Source::File, Some("conntrack.udpTimeout"));
        let drain = setting("--drain", "30s", Source::Default, None);
        assert_eq!(settings.differences(&[udp.clone(), drain]), std::slice::from_ref(&udp));
        assert!(settings.wait([udp.clone()]));
        assert!(!settings.wait([udp.clone()]), "said once");
        assert!(settings.json().contains(r#""after_restart":"2m""#), "{}", settings.json());
        settings.wait([]);
        settings.apply(udp.clone());
        assert_eq!(settings.differences(&[udp]), []);
        assert!(!settings.json().contains("after_restart"), "{}", settings.json());
    }
}
