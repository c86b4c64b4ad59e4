//! The part of kustomize that `deploy/` uses: resources, components, images, and strategic merge
//! patches in files of their own. Whatever it does not support is an error, so that the objects
//! under test are those that `kubectl apply -k` would apply.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;
use serde_json::{Map, Value};

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Kustomization {
    api_version: String,
    kind: String,
    #[serde(default)]
    resources: Vec<String>,
    #[serde(default)]
    components: Vec<String>,
    #[serde(default)]
    patches: Vec<Patch>,
    #[serde(default)]
    images: Vec<Image>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Patch {
    path: String,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Image {
    name: String,
    new_name: Option<String>,
    new_tag: Option<String>,
}

/// Lists whose elements are merged, and the field that identifies an element, as `patchMergeKey` in
/// the API's types defines it.
const MERGED: [(&str, &str); 5] = [
    ("containers", "name"),
    ("env", "name"),
    ("ports", "containerPort"),
    ("volumeMounts", "mountPath"),
    ("volumes", "name"),
];
/// Lists that are replaced as a whole.
const ATOMIC: [&str; 6] = ["args", "command", "envFrom", "tolerations", "add", "drop"];

/// Returns the objects of a folder with a `kustomization.yaml`.
///
/// # Errors
/// A file cannot be read, has a field that is not supported here, or patches an object that does
/// not exist.
pub fn build(folder: &Path) -> Result<Vec<Value>> {
    let kustomization = read(folder, ("kustomize.config.k8s.io/v1beta1", "Kustomization"))?;
    let mut objects = Vec::new();
    for resource in &kustomization.resources {
        let resource = folder.join(resource);
        objects.extend(if resource.is_dir() { build(&resource)? } else { documents(&resource)? });
    }
    ensure_once(folder, &objects)?;
    // A component adds objects to the resources, and changes all of them.
    for component in &kustomization.components {
        let component = folder.join(component);
        let content = read(&component, ("kustomize.config.k8s.io/v1alpha1", "Component"))?;
        for resource in &content.resources {
            objects.extend(documents(&component.join(resource))?);
        }
        ensure_once(&component, &objects)?;
        ensure!(
            content.components.is_empty(),
            "{}: components of components are not known here",
            component.display()
        );
        change(&component, &content, &mut objects)?;
    }
    change(folder, &kustomization, &mut objects)?;
    Ok(objects)
}

fn ensure_once(folder: &Path, objects: &[Value]) -> Result<()> {
    for (place, object) in objects.iter().enumerate() {
        let again = objects[..place].iter().any(|other| identity(other) == identity(object));
        ensure!(!again, "{}: {:?} is there twice", folder.display(), identity(object));
    }
    Ok(())
}

fn read(folder: &Path, wanted: (&str, &str)) -> Result<Kustomization> {
    let path = folder.join("kustomization.yaml");
    let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    let kustomization: Kustomization =
        serde_yaml_ng::from_str(&text).with_context(|| path.display().to_string())?;
    let named = (kustomization.api_version.as_str(), kustomization.kind.as_str());
    ensure!(named == wanted, "{}: it is {named:?}", path.display());
    Ok(kustomization)
}

/// Applies patches, then names of images, as kustomize does.
fn change(folder: &Path, kustomization: &Kustomization, objects: &mut [Value]) -> Result<()> {
    for Patch { path: file } in &kustomization.patches {
        let file = folder.join(file);
        for patch in documents(&file)? {
            let target = objects.iter_mut().find(|object| identity(object) == identity(&patch));
            let target = target.with_context(|| {
                format!("{}: there is no {:?} to patch", file.display(), identity(&patch))
            })?;
            merge(target, &patch, "").with_context(|| file.display().to_string())?;
        }
    }
    for image in &kustomization.images {
        let named = objects.iter_mut().fold(false, |named, object| rename(object, image) | named);
        ensure!(named, "{}: no container has the image {}", folder.display(), image.name);
    }
    Ok(())
}

/// Replaces the image of containers. Returns whether any container had it.
fn rename(value: &mut Value, image: &Image) -> bool {
    let mut found = false;
    match value {
        Value::Object(fields) => {
            for (key, value) in fields {
                if let (true, Some(text)) = (key == "image", value.as_str())
                    && let Some((name, tag)) = text.rsplit_once(':')
                    && name == image.name
                {
                    let name = image.new_name.as_deref().unwrap_or(name);
                    let tag = image.new_tag.as_deref().unwrap_or(tag);
                    *value = format!("{name}:{tag}").into();
                    found = true;
                } else {
                    found |= rename(value, image);
                }
            }
        }
        Value::Array(values) => {
            for value in values {
                found |= rename(value, image);
            }
        }
        _ => {}
    }
    found
}

/// Returns the objects of a file.
pub fn documents(path: &Path) -> Result<Vec<Value>> {
    let text = fs::read_to_string(path).with_context(|| path.display().to_string())?;
    let mut objects = Vec::new();
    for document in serde_yaml_ng::Deserializer::from_str(&text) {
        let object = Value::deserialize(document).with_context(|| path.display().to_string())?;
        let named = identity(&object).iter().take(3).all(|part| part.is_some_and(|part| !part.is_empty()));
        ensure!(named, "{}: an object lacks apiVersion, kind or name", path.display());
        objects.push(object);
    }
    ensure!(!objects.is_empty(), "{} has no object", path.display());
    Ok(objects)
}

/// The identity of an object: version, kind, name, namespace.
fn identity(object: &Value) -> [Option<&str>; 4] {
    let metadata = &object["metadata"];
    [&object["apiVersion"], &object["kind"], &metadata["name"], &metadata["namespace"]].map(Value::as_str)
}

fn merge(target: &mut Value, patch: &Value, path: &str) -> Result<()> {
    match (target, patch) {
        (Value::Object(target), Value::Object(patch)) => merge_fields(target, patch, path),
        (Value::Array(target), Value::Array(patch)) => merge_list(target, patch, path),
        (target @ (Value::Object(_) | Value::Array(_)), _) => {
            bail!("{path}: the patch is {patch}, where there is {target}")
        }
        (target, _) => {
            *target = patch.clone();
            Ok(())
        }
    }
}

fn merge_fields(target: &mut Map<String, Value>, patch: &Map<String, Value>, path: &str) -> Result<()> {
    for (key, value) in patch {
        let path = format!("{path}.{key}");
        ensure!(!key.starts_with('$'), "{path}: directives are not known here");
        match target.get_mut(key) {
            Some(_) if value.is_null() => drop(target.remove(key)),
            None if value.is_null() => bail!("{path}: there is nothing to remove"),
            Some(present) => merge(present, value, &path)?,
            None => drop(target.insert(key.clone(), value.clone())),
        }
    }
    Ok(())
}

fn merge_list(target: &mut Vec<Value>, patch: &[Value], path: &str) -> Result<()> {
    let name = path.rsplit('.').next().unwrap_or_default();
    if ATOMIC.contains(&name) {
        *target = patch.to_vec();
        return Ok(());
    }
    let key = MERGED.iter().find(|(list, _)| *list == name).map(|(_, key)| *key);
    let key = key.with_context(|| format!("{path}: how this list is merged is not known here"))?;
    for element in patch {
        let own = element.get(key).with_context(|| format!("{path}: an element has no {key}"))?;
        match target.iter_mut().find(|other| other.get(key) == Some(own)) {
            Some(present) => merge(present, element, path)?,
            // kubectl puts new elements first; nothing here depends on it.
            None => target.push(element.clone()),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const BASE: &str = "apiVersion: apps/v1\nkind: DaemonSet\nmetadata: {name: a, namespace: n}\nspec:\n  containers:\n  - {name: x, args: [run], env: [{name: A, value: b}], probe: {path: /livez}}\n";

    fn built(kustomization: &str, patch: &str) -> Result<Vec<Value>> {
        let folder = tempfile::tempdir()?;
        let head = "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\n";
        for (name, text) in [
            ("kustomization.yaml", format!("{head}{kustomization}")),
            ("base.yaml", BASE.to_owned()),
            ("patch.yaml", patch.to_owned()),
        ] {
            fs::write(folder.path().join(name), text)?;
        }
        build(folder.path())
    }

    const WITH_PATCH: &str = "resources: [base.yaml]\npatches: [{path: patch.yaml}]\n";

    fn patch(containers: &str) -> String {
        format!(
            "apiVersion: apps/v1\nkind: DaemonSet\nmetadata: {{name: a, namespace: n}}\nspec: {{containers: {containers}}}\n"
        )
    }

    #[test]
    fn named_elements_are_merged_and_arguments_replaced() {
        let text = patch(
            "[{name: x, args: [cleanup], probe: null, env: [{name: A, value: c}, {name: B, value: d}]}]",
        );
        let objects = built(WITH_PATCH, &text).unwrap();
        assert_eq!(
            objects[0]["spec"]["containers"],
            json!([{
                "name": "x",
                "args": ["cleanup"],
                "env": [{"name": "A", "value": "c"}, {"name": "B", "value": "d"}],
            }])
        );
    }

    #[test]
    fn what_is_not_known_is_refused() {
        let fine = patch("[{name: x}]");
        for (kustomization, text, word) in [
            (WITH_PATCH, fine.replace("name: a", "name: b"), "to patch"),
            (WITH_PATCH, fine.replace("DaemonSet", "Pod"), "to patch"),
            (WITH_PATCH, patch("[{name: x, $patch: delete}]"), "directives"),
            (WITH_PATCH, patch("[{args: [a]}]"), "no name"),
            (WITH_PATCH, patch("[{name: x, nothing: null}]"), "nothing to remove"),
            (WITH_PATCH, patch("{name: x}"), "where there is"),
            ("resources: [base.yaml, base.yaml]\n", fine.clone(), "twice"),
            ("resources: [other.yaml]\n", fine.clone(), "other.yaml"),
            ("resources: [base.yaml]\nnamePrefix: x\n", fine.clone(), "namePrefix"),
            ("resources: [base.yaml]\nimages: [{name: no, newTag: a}]\n", fine.clone(), "no container"),
            ("resources: [base.yaml]\ncomponents: [.]\n", fine.clone(), "Kustomization"),
        ] {
            let error = format!("{:#}", built(kustomization, &text).unwrap_err());
            assert!(error.contains(word), "{error}");
        }
    }
}
