//! The folder of manifests that agents follow.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde_json::Value;
use tempfile::NamedTempFile;

use super::node;
use super::service::Service;
use super::slice::Backend;
use crate::lab::Lab;

/// A writer of objects. Each file is replaced atomically: a reader sees the old or the new content,
/// never a part of it.
#[derive(Clone, Debug)]
pub struct Manifests(PathBuf);

impl Manifests {
    /// The folder of the lab, with its Node objects in it.
    pub fn of(lab: &Lab) -> Result<Self> {
        let manifests = Self::at(&lab.manifests())?;
        manifests.write("nodes", &lab.nodes().iter().map(node::object).collect::<Vec<_>>())?;
        Ok(manifests)
    }

    /// A folder of the caller's choice.
    pub fn at(folder: &Path) -> Result<Self> {
        fs::create_dir_all(folder).with_context(|| format!("creating {}", folder.display()))?;
        Ok(Self(folder.to_owned()))
    }

    pub fn folder(&self) -> &Path {
        &self.0
    }

    /// Writes a Service and its endpoints, each to a file of its own: endpoints first, as nothing
    /// uses them yet.
    pub fn apply(&self, service: &Service, backends: &[Backend]) -> Result<()> {
        self.endpoints(service, backends)?;
        self.service(service)
    }

    /// Writes a Service alone.
    pub fn service(&self, service: &Service) -> Result<()> {
        self.write(&format!("service-{}-{}", service.namespace, service.name), &[service.object()])
    }

    /// Writes the endpoints of a Service alone.
    pub fn endpoints(&self, service: &Service, backends: &[Backend]) -> Result<()> {
        self.write(&format!("endpoints-{}-{}", service.namespace, service.name), &service.slices(backends))
    }

    /// Deletes a Service and its endpoints.
    pub fn delete(&self, service: &Service) -> Result<()> {
        for kind in ["service", "endpoints"] {
            let path = self.0.join(format!("{kind}-{}-{}.yaml", service.namespace, service.name));
            fs::remove_file(&path).with_context(|| format!("removing {}", path.display()))?;
        }
        Ok(())
    }

    /// Writes any objects to one file, `<name>.yaml`.
    pub fn write(&self, name: &str, objects: &[Value]) -> Result<()> {
        let documents: Result<Vec<_>, _> = objects.iter().map(serde_yaml_ng::to_string).collect();
        self.write_text(name, &documents?.join("---\n"))
    }

    /// Writes any text, which need not be YAML.
    pub fn write_text(&self, name: &str, text: &str) -> Result<()> {
        let path = self.0.join(format!("{name}.yaml"));
        let mut file = tempfile::Builder::new().prefix(".").suffix(".tmp").tempfile_in(&self.0)?;
        file.write_all(text.as_bytes())?;
        let persisted = NamedTempFile::persist(file, &path);
        persisted.map(drop).with_context(|| format!("writing {}", path.display()))
    }
}
