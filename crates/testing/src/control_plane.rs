//! The small API server on a lab's router, where the agents of its nodes reach it.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use anyhow::Result;
use serde_json::json;
use tokio::runtime::{Builder, Runtime};

use crate::api_server::{ApiServer, Certificate, Kind};
use crate::lab::{Family, Lab, plan};
use crate::object::{Backend, Service, node};

const PORT: u16 = 6443;

/// A running API server with the lab's Nodes in it. It serves on a thread of its own.
#[derive(Debug)]
pub struct ControlPlane {
    server: ApiServer,
    kubeconfig: PathBuf,
    /// Names of the Services with a ClusterIP: the last number of the address is the position here,
    /// plus one.
    allocated: Mutex<Vec<String>>,
    runtime: Runtime,
}

impl ControlPlane {
    pub fn start(lab: &Lab) -> Result<Self> {
        Self::start_with(lab, None)
    }

    /// A variant of [`Self::start`] with TLS, as pods with a service account need it.
    pub fn start_tls(lab: &Lab, certificate: Certificate) -> Result<Self> {
        Self::start_with(lab, Some(certificate))
    }

    fn start_with(lab: &Lab, certificate: Option<Certificate>) -> Result<Self> {
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
        let address = SocketAddr::new(plan::gateway(0).of(Family::V4), PORT);
        let server = {
            let _inside = runtime.enter();
            match certificate {
                None => ApiServer::start_in(lab.router(), address)?,
                Some(certificate) => ApiServer::start_tls_in(lab.router(), address, certificate)?,
            }
        };
        lab.nodes().iter().try_for_each(|node| server.put(node::object(node)))?;
        let kubeconfig = lab.logs().join("kubeconfig");
        server.write_kubeconfig(&kubeconfig)?;
        Ok(Self { server, kubeconfig, allocated: Mutex::default(), runtime })
    }

    /// The path of a file for `--kubeconfig`.
    pub fn kubeconfig(&self) -> &Path {
        &self.kubeconfig
    }

    /// The server itself, for faults other than [`Self::go_away`].
    pub fn server(&self) -> &ApiServer {
        &self.server
    }

    /// Applies a Service and its endpoints: endpoints first, as nothing uses them yet.
    pub fn apply(&self, service: &Service, backends: &[Backend]) -> Result<()> {
        self.endpoints(service, backends)?;
        self.service(service)
    }

    /// Applies a Service alone, and allocates its ClusterIPs as a real API server does.
    pub fn service(&self, service: &Service) -> Result<()> {
        let mut object = service.object();
        if object["spec"].get("clusterIP").is_none() {
            let number = self.number_of(service.name());
            object["spec"]["clusterIPs"] =
                json!([format!("10.96.1.{number}"), format!("fd00:10:96::{number}")]);
            object["spec"]["clusterIP"] = object["spec"]["clusterIPs"][0].clone();
        }
        self.server.put(object)
    }

    fn number_of(&self, service: &str) -> usize {
        let mut allocated = self.allocated.lock().unwrap_or_else(PoisonError::into_inner);
        let found = allocated.iter().position(|name| name == service);
        1 + found.unwrap_or_else(|| {
            allocated.push(service.to_owned());
            allocated.len() - 1
        })
    }

    /// Applies the endpoints of a Service alone.
    pub fn endpoints(&self, service: &Service, backends: &[Backend]) -> Result<()> {
        service.slices(backends).into_iter().try_for_each(|slice| self.server.put(slice))
    }

    /// Deletes a Service and its endpoints, if they exist.
    pub fn delete(&self, service: &Service) {
        let object = service.object();
        let namespace = object["metadata"]["namespace"].as_str().unwrap_or_default();
        self.server.delete(Kind::Service, namespace, service.name());
        for slice in service.slices(&[]) {
            let name = slice["metadata"]["name"].as_str().unwrap_or_default();
            self.server.delete(Kind::EndpointSlice, namespace, name);
        }
    }

    /// Stops the server: connections break, new ones are refused.
    pub fn go_away(&mut self) {
        self.runtime.block_on(self.server.stop());
    }

    /// Serves again, with all changes that were applied meanwhile.
    pub fn come_back(&mut self) -> Result<()> {
        Ok(self.runtime.block_on(self.server.restart())?)
    }
}
