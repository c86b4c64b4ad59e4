//! The cluster's objects, which differ only in their numbers.

use std::net::Ipv4Addr;

use serde_json::Value;
use traffic_policy_testing::{
    lab::{Addresses, Family},
    object::{Backend, Port, Service, lease},
};

use super::ENDPOINTS;

pub(super) const PORT: u16 = 80;
pub(super) const TARGET_PORT: u16 = 8_080;
/// Node port of the first Service that has one.
const FIRST_NODE_PORT: u16 = 30_100;
/// Number of Services per node port.
const PER_NODE_PORT: u32 = 10;
/// Number of Services per one with the algorithm maglev, where there are any.
pub(super) const MAGLEV_EVERY: u32 = 20;
/// Number of other nodes, which have the endpoints.
const NODES: u32 = 50;

/// Returns the cluster IP of a Service.
pub(super) fn cluster_ip(number: u32) -> Ipv4Addr {
    Ipv4Addr::from(u32::from(Ipv4Addr::new(10, 100, 0, 1)) + number)
}

/// Returns the address of an endpoint; a Service that is being changed has one with a further
/// number.
fn endpoint(service: u32, number: u32) -> Addresses {
    let place = service * ENDPOINTS + number % ENDPOINTS;
    let first = if number < ENDPOINTS { Ipv4Addr::new(10, 128, 0, 1) } else { Ipv4Addr::new(10, 144, 0, 1) };
    let [a, b, c, d] = Ipv4Addr::from(u32::from(first) + place).octets();
    Addresses::new([a, b, c, d], [0xfd00, 0x128, 0, 0, 0, 0, (place >> 16) as u16, place as u16])
}

fn service(number: u32) -> Service {
    let port = Port::tcp(PORT, TARGET_PORT);
    let has_node_port = number.is_multiple_of(PER_NODE_PORT);
    let node_port = FIRST_NODE_PORT + (number / PER_NODE_PORT) as u16;
    let service = Service::new(&format!("service-{number:05}")).namespace("scale");
    let service = service.families(&[Family::V4]).cluster_ip(cluster_ip(number).into());
    if has_node_port { service.port(port.node_port(node_port)) } else { service.port(port).only_cluster_ip() }
}

/// Returns the Leases of the nodes with the endpoints, by which they take part in direct
/// forwarding.
pub(super) fn leases() -> impl Iterator<Item = Value> {
    (2..2 + NODES).map(|node| {
        let last = node as u8;
        let addresses = Addresses::new([192, 0, 2, last], [0x2001, 0xdb8, 0x77, 0, 0, 0, 0, last.into()]);
        lease::tunnels_at(&format!("node-{node}"), &addresses)
    })
}

/// Returns the Service object and its EndpointSlice. With `maglev`, every 20th Service has that
/// algorithm.
pub(super) fn objects(number: u32, maglev: bool) -> Vec<Value> {
    let mut objects = slices(number, 0..ENDPOINTS);
    let service = service(number);
    let service = if maglev && number.is_multiple_of(MAGLEV_EVERY) { by_table(service) } else { service };
    objects.push(service.object());
    objects
}

fn by_table(service: Service) -> Service {
    service.annotation("traffic-policy.io/algorithm", "maglev")
}

/// Returns the object of a Service with the algorithm maglev of whose ten endpoints, each on a node
/// of its own, two have other weights than the rest.
pub(super) fn weighted(number: u32) -> Value {
    let nodes = (2..2 + NODES).filter_map(|node| match node % ENDPOINTS {
        2 => Some(format!("node-{node}=3")),
        5 => Some(format!("node-{node}=2")),
        _ => None,
    });
    let weights = nodes.collect::<Vec<_>>().join(",");
    by_table(service(number)).annotation("traffic-policy.io/weight", &weights).object()
}

/// Returns the EndpointSlice of a Service with these of its endpoints.
pub(super) fn slices(number: u32, endpoints: impl IntoIterator<Item = u32>) -> Vec<Value> {
    let backend = |i: u32| {
        let node = format!("node-{}", 2 + (number * ENDPOINTS + i) % NODES);
        Backend::at(&endpoint(number, i)).on_node(&node)
    };
    let backends: Vec<_> = endpoints.into_iter().map(backend).collect();
    let mut slices = service(number).slices(&backends);
    for slice in &mut slices {
        // The endpoint slice controller writes these fields; the agent skips them.
        slice["metadata"]["generateName"] = format!("service-{number:05}-").into();
        slice["metadata"]["labels"]["endpointslice.kubernetes.io/managed-by"] =
            "endpointslice-controller.k8s.io".into();
        for (endpoint, i) in slice["endpoints"].as_array_mut().into_iter().flatten().zip(0..) {
            endpoint["zone"] = format!("zone-{}", i % 3).into();
            endpoint["targetRef"] = serde_json::json!({
                "kind": "Pod",
                "namespace": "scale",
                "name": format!("service-{number:05}-6d4b75cb6d-{i:05}"),
                "uid": format!("7f2b54f4-38d7-4d0f-9d4c-{number:06}{i:06}"),
            });
        }
    }
    slices
}
