//! The Services of a cluster, as every subject receives them.

use serde_json::Value;
use std::net::Ipv4Addr;
use traffic_policy_testing::{
    lab::Addresses,
    object::{Backend, Port, Service as Object, node},
};

use super::{
    fixture::{ENDPOINTS, NODE, SERVER},
    generator::{NODE_PORT, TARGET_PORT, later},
};

/// The node port of the Service that answers HTTP.
pub(crate) const HTTP_NODE_PORT: u16 = 30_081;
/// Number of endpoints of the flooded Service.
pub(crate) const FLOODED: u32 = 8;
/// Number of endpoints of each Service without requests.
const OTHERS: u32 = 3;
pub(crate) const PORT: u16 = 80;
pub(crate) const CLUSTER: &str = "10.1.0.0/16";
pub(crate) const CLUSTER_IPS: &str = "10.96.0.0/12";
pub(crate) const NODE_NAME: &str = "node";

/// One Service with one TCP port, of policy Cluster.
pub(crate) struct Service {
    pub(crate) name: String,
    pub(crate) cluster_ip: Ipv4Addr,
    pub(crate) node_port: Option<u16>,
    pub(crate) endpoints: Vec<Ipv4Addr>,
}

/// Returns this number of Services. Those with a node port are in the middle: first that of floods,
/// then, if there are two, that of HTTP.
pub(crate) fn services(number: u32) -> Vec<Service> {
    let service = |i: u32| {
        let (name, node_port, endpoints) = match i.wrapping_sub(number / 2) {
            0 => {
                let endpoints = (0..FLOODED).map(|i| later(ENDPOINTS, 1 + i)).collect();
                ("flooded".to_owned(), Some(NODE_PORT), endpoints)
            }
            1 => ("http".to_owned(), Some(HTTP_NODE_PORT), vec![SERVER]),
            _ => {
                let first = later(ENDPOINTS, 1_000 + i * OTHERS);
                (format!("other-{i}"), None, (0..OTHERS).map(|i| later(first, i)).collect())
            }
        };
        Service { name, cluster_ip: later(Ipv4Addr::new(10, 96, 1, 0), i), node_port, endpoints }
    };
    (0..number).map(service).collect()
}

/// Returns the Kubernetes objects: the Node, and each Service with its EndpointSlice.
pub(crate) fn objects(services: &[Service]) -> Vec<Value> {
    objects_with(services, Port::tcp)
}

/// Returns the same objects with ports of another protocol, made from port and target port.
pub(crate) fn objects_with(services: &[Service], port_of: fn(u16, u16) -> Port) -> Vec<Value> {
    let mut objects = vec![node(NODE_NAME, NODE, "10.244.0.0/24")];
    for service in services {
        let mut port = port_of(PORT, TARGET_PORT);
        if let Some(node_port) = service.node_port {
            port = port.node_port(node_port);
        }
        let object = Object::new(&service.name).families(&[traffic_policy_testing::lab::Family::V4]);
        let mut object = object.port(port).cluster_ip(service.cluster_ip.into());
        if service.node_port.is_none() {
            object = object.only_cluster_ip();
        }
        let backends: Vec<_> = service
            .endpoints
            .iter()
            .map(|address| {
                Backend::at(&Addresses::new(address.octets(), [0xfd00, 0, 0, 0, 0, 0, 0, 1])).on_node("other")
            })
            .collect();
        objects.extend(object.slices(&backends));
        objects.push(object.object());
    }
    objects
}

/// Returns the object of a node with one address and one network of pods.
pub(crate) fn node(name: &str, address: Ipv4Addr, network: &str) -> Value {
    node::with_addresses(name, &[address.into()], &[network.to_owned()])
}
