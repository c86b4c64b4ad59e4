//! Service objects.

use std::net::IpAddr;

use serde_json::{Value, json};

use crate::lab::Family;

/// An `externalTrafficPolicy` or `internalTrafficPolicy`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    Cluster,
    Local,
}

impl Policy {
    fn name(self) -> &'static str {
        match self {
            Self::Cluster => "Cluster",
            Self::Local => "Local",
        }
    }
}

/// A port of a Service, and the port of its pods.
#[derive(Clone, Debug)]
pub struct Port {
    pub(super) name: String,
    pub(super) protocol: &'static str,
    pub(super) port: u16,
    pub(super) target: u16,
    pub(super) node_port: Option<u16>,
}

impl Port {
    pub fn tcp(port: u16, target: u16) -> Self {
        Self { name: format!("tcp-{port}"), protocol: "TCP", port, target, node_port: None }
    }

    pub fn udp(port: u16, target: u16) -> Self {
        Self { name: format!("udp-{port}"), protocol: "UDP", port, target, node_port: None }
    }

    pub fn sctp(port: u16, target: u16) -> Self {
        Self { name: format!("sctp-{port}"), protocol: "SCTP", port, target, node_port: None }
    }

    pub fn node_port(mut self, port: u16) -> Self {
        self.node_port = Some(port);
        self
    }

    pub fn named(mut self, name: &str) -> Self {
        self.name = name.to_owned();
        self
    }
}

/// A Service of type NodePort in the namespace `default`, dual stack, unless changed.
#[derive(Clone, Debug)]
pub struct Service {
    pub(super) name: String,
    pub(super) namespace: String,
    pub(super) families: Vec<Family>,
    pub(super) ports: Vec<Port>,
    kind: &'static str,
    external: Policy,
    internal: Policy,
    cluster_ips: Vec<IpAddr>,
    vips: Vec<IpAddr>,
    external_ips: Vec<IpAddr>,
    health_port: Option<u16>,
    annotations: serde_json::Map<String, Value>,
    /// Further fields of the spec that a test sets.
    spec: serde_json::Map<String, Value>,
}

impl Service {
    pub fn new(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            namespace: "default".to_owned(),
            families: Family::BOTH.to_vec(),
            ports: Vec::new(),
            kind: "NodePort",
            external: Policy::Cluster,
            internal: Policy::Cluster,
            cluster_ips: Vec::new(),
            vips: Vec::new(),
            external_ips: Vec::new(),
            health_port: None,
            annotations: serde_json::Map::new(),
            spec: serde_json::Map::new(),
        }
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn namespace(mut self, namespace: &str) -> Self {
        self.namespace = namespace.to_owned();
        self
    }

    pub fn families(mut self, families: &[Family]) -> Self {
        self.families = families.to_vec();
        self
    }

    pub fn port(mut self, port: Port) -> Self {
        self.ports.push(port);
        self
    }

    /// Sets the externalTrafficPolicy.
    pub fn policy(mut self, policy: Policy) -> Self {
        self.external = policy;
        self
    }

    pub fn internal_policy(mut self, policy: Policy) -> Self {
        self.internal = policy;
        self
    }

    pub fn cluster_ip(mut self, address: IpAddr) -> Self {
        self.cluster_ips.push(address);
        self
    }

    pub fn only_cluster_ip(mut self) -> Self {
        self.kind = "ClusterIP";
        self
    }

    /// Makes the Service type LoadBalancer, and adds a load balancer address.
    pub fn vip(mut self, address: IpAddr) -> Self {
        self.kind = "LoadBalancer";
        self.vips.push(address);
        self
    }

    pub fn external_ip(mut self, address: IpAddr) -> Self {
        self.external_ips.push(address);
        self
    }

    /// Makes the Service type LoadBalancer with a healthCheckNodePort.
    pub fn health_port(mut self, port: u16) -> Self {
        self.kind = "LoadBalancer";
        self.health_port = Some(port);
        self
    }

    pub fn annotation(mut self, key: &str, value: &str) -> Self {
        self.annotations.insert(key.to_owned(), value.into());
        self
    }

    /// Sets any field of the spec.
    pub fn spec(mut self, field: &str, value: Value) -> Self {
        self.spec.insert(field.to_owned(), value);
        self
    }

    pub fn object(&self) -> Value {
        let families = self.families.iter().map(|family| match family {
            Family::V4 => "IPv4",
            Family::V6 => "IPv6",
        });
        let ports = self.ports.iter().map(|port| {
            let Port { name, protocol, port, target, node_port } = port;
            let mut value = json!({"name": name, "protocol": protocol, "port": port, "targetPort": target});
            if let Some(node_port) = node_port {
                value["nodePort"] = json!(node_port);
            }
            value
        });
        let mut object = json!({
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": self.name, "namespace": self.namespace},
            "spec": {
                "type": self.kind,
                "selector": {"app": self.name},
                "internalTrafficPolicy": self.internal.name(),
                "ipFamilies": families.collect::<Vec<_>>(),
                "ipFamilyPolicy": if self.families.len() == 2 { "PreferDualStack" } else { "SingleStack" },
                "ports": ports.collect::<Vec<_>>(),
            },
        });
        let spec = &mut object["spec"];
        if self.kind != "ClusterIP" || !self.external_ips.is_empty() {
            spec["externalTrafficPolicy"] = self.external.name().into();
        }
        if let Some(first) = self.cluster_ips.first() {
            spec["clusterIP"] = json!(first);
            spec["clusterIPs"] = json!(self.cluster_ips);
        }
        if !self.external_ips.is_empty() {
            spec["externalIPs"] = json!(self.external_ips);
        }
        if let Some(port) = self.health_port {
            spec["healthCheckNodePort"] = json!(port);
        }
        for (field, value) in &self.spec {
            spec[field] = value.clone();
        }
        if !self.annotations.is_empty() {
            object["metadata"]["annotations"] = self.annotations.clone().into();
        }
        if !self.vips.is_empty() {
            let ingress: Vec<_> = self.vips.iter().map(|ip| json!({"ip": ip})).collect();
            object["status"] = json!({"loadBalancer": {"ingress": ingress}});
        }
        object
    }
}
