//! EndpointSlice objects.

use std::net::IpAddr;

use serde_json::{Value, json};

use super::service::Service;
use crate::lab::{Addresses, Family, Pod};

/// An endpoint of a Service and its conditions; ready unless changed.
#[derive(Clone, Debug)]
pub struct Backend {
    addresses: Vec<IpAddr>,
    node: Option<String>,
    pod: Option<String>,
    ready: bool,
    serving: bool,
    terminating: bool,
}

impl Backend {
    pub fn of(pod: &Pod) -> Self {
        let mut backend = Self::at(&pod.addresses).on_node(&pod.node);
        backend.pod = Some(pod.name.clone());
        backend
    }

    /// Makes an endpoint that belongs to no pod and no node.
    pub fn at(addresses: &Addresses) -> Self {
        let addresses = Family::BOTH.map(|family| addresses.of(family)).to_vec();
        Self { addresses, node: None, pod: None, ready: true, serving: true, terminating: false }
    }

    pub fn on_node(mut self, node: &str) -> Self {
        self.node = Some(node.to_owned());
        self
    }

    pub fn without_node(mut self) -> Self {
        self.node = None;
        self
    }

    /// Makes it neither ready nor serving, like a pod whose readiness probe fails.
    pub fn not_ready(mut self) -> Self {
        (self.ready, self.serving) = (false, false);
        self
    }

    /// Makes it terminating, but still serving.
    pub fn terminating(mut self) -> Self {
        (self.ready, self.serving, self.terminating) = (false, true, true);
        self
    }

    pub fn conditions(mut self, ready: bool, serving: bool, terminating: bool) -> Self {
        (self.ready, self.serving, self.terminating) = (ready, serving, terminating);
        self
    }

    fn object(&self, family: Family) -> Value {
        let of_family = |address: &&IpAddr| address.is_ipv4() == (family == Family::V4);
        let addresses: Vec<_> = self.addresses.iter().filter(of_family).collect();
        let conditions =
            json!({"ready": self.ready, "serving": self.serving, "terminating": self.terminating});
        let mut object = json!({"addresses": addresses, "conditions": conditions});
        if let Some(node) = &self.node {
            object["nodeName"] = json!(node);
        }
        if let Some(pod) = &self.pod {
            object["targetRef"] = json!({"kind": "Pod", "name": pod, "namespace": "default"});
        }
        object
    }
}

impl Service {
    /// Returns one EndpointSlice for each family.
    pub fn slices(&self, backends: &[Backend]) -> Vec<Value> {
        self.families.iter().map(|family| object(self, *family, backends)).collect()
    }
}

fn object(service: &Service, family: Family, backends: &[Backend]) -> Value {
    let (suffix, address_type) = match family {
        Family::V4 => ("v4", "IPv4"),
        Family::V6 => ("v6", "IPv6"),
    };
    let ports = service
        .ports
        .iter()
        .map(|port| json!({"name": port.name, "protocol": port.protocol, "port": port.target}));
    json!({
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": format!("{}-{suffix}", service.name),
            "namespace": service.namespace,
            "labels": {"kubernetes.io/service-name": service.name},
        },
        "addressType": address_type,
        "ports": ports.collect::<Vec<_>>(),
        "endpoints": backends.iter().map(|backend| backend.object(family)).collect::<Vec<_>>(),
    })
}
