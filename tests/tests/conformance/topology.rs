//! The node of the generated cases, its neighbours, and Services in a folder of manifests.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    path::Path,
};

use serde_json::{Value, json};
use tempfile::TempDir;
use traffic_policy_testing::{
    lab::Family,
    object::{Manifests, Service},
};

use super::{
    deviations::{Origin, To},
    explain::NODE,
    reference::{Endpoint, ZONE},
};

/// The port of all Services, and of all endpoints.
pub const PORT: u16 = 80;
pub const TARGET: u16 = 8080;

/// The primary and the secondary address of the node, for each family.
const LOCAL: [&str; 4] = ["192.168.0.2", "192.168.1.2", "2001:db8::2", "2001:db8:1::2"];

pub fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

/// The node's addresses as options of `explain`.
pub fn options(more: &[&str]) -> Vec<String> {
    let addresses = LOCAL.iter().flat_map(|address| ["--local-address", address]);
    addresses.chain(more.iter().copied()).map(str::to_owned).collect()
}

/// Sources of flows of a family: name, address, origin as seen from this node.
pub fn sources(family: Family) -> [(&'static str, IpAddr, Origin); 6] {
    let by_family = |v4, v6| ip(if family == Family::V4 { v4 } else { v6 });
    [
        ("pod", by_family("10.180.0.9", "fd00:10::9"), Origin::Pod),
        ("endpoint pod", by_family("10.180.0.1", "fd00:10::1"), Origin::Pod),
        ("node", primary(family), Origin::Node),
        ("node by its other address", secondary(family), Origin::Node),
        ("external client", by_family("203.0.113.2", "2001:db8:cafe::2"), Origin::External),
        ("pod of another node", by_family("10.180.1.9", "fd00:10:0:1::9"), Origin::External),
    ]
}

pub fn primary(family: Family) -> IpAddr {
    ip(if family == Family::V4 { LOCAL[0] } else { LOCAL[2] })
}

pub fn secondary(family: Family) -> IpAddr {
    ip(if family == Family::V4 { LOCAL[1] } else { LOCAL[3] })
}

/// The `number`th endpoint on a node; 0 is the node in question.
pub fn endpoint_address(family: Family, node: u8, number: u8) -> SocketAddr {
    let address: IpAddr = match family {
        Family::V4 => Ipv4Addr::new(10, 180, node, number).into(),
        Family::V6 => Ipv6Addr::new(0xfd00, 0x10, 0, node.into(), 0, 0, 0, number.into()).into(),
    };
    SocketAddr::new(address, TARGET)
}

/// An address of the Service with this number.
pub fn address(number: u16, family: Family, to: To) -> SocketAddr {
    let [high, low] = number.to_be_bytes();
    let (v4, v6): (Ipv4Addr, Ipv6Addr) = match to {
        To::NodePort => return SocketAddr::new(primary(family), node_port(number)),
        To::ClusterIp => ([172, 30, high, low].into(), [0xfd00, 0x10, 0x96, 0, 0, 0, 0, number].into()),
        To::LoadBalancer => ([198, 18, high, low].into(), [0x2001, 0xdb8, 0x18, 0, 0, 0, 0, number].into()),
        To::ExternalIp => ([198, 19, high, low].into(), [0x2001, 0xdb8, 0x19, 0, 0, 0, 0, number].into()),
    };
    SocketAddr::new(if family == Family::V4 { v4.into() } else { v6.into() }, PORT)
}

pub fn node_port(number: u16) -> u16 {
    30_000 + number
}

/// A Service of both families without ports, with a ClusterIP, a load balancer's address and an
/// external address of each.
pub fn service(number: u16) -> Service {
    let mut service = Service::new(&format!("s{number}"));
    for family in Family::BOTH {
        service = service
            .cluster_ip(address(number, family, To::ClusterIp).ip())
            .vip(address(number, family, To::LoadBalancer).ip())
            .external_ip(address(number, family, To::ExternalIp).ip());
    }
    service
}

/// The slice of a Service's endpoints of one family.
pub fn slice(service: &Service, family: Family, protocol: &str, endpoints: &[Endpoint]) -> Value {
    let mut slices = service.slices(&[]).into_iter();
    let mut slice = if family == Family::V4 { slices.next() } else { slices.nth(1) }.unwrap();
    slice["ports"] = json!([{"name": "web", "protocol": protocol, "port": TARGET}]);
    slice["endpoints"] = endpoints.iter().map(endpoint).collect();
    slice
}

fn endpoint(endpoint: &Endpoint) -> Value {
    let Endpoint { address, node, ready, serving, terminating, for_zone, for_node } = endpoint;
    let mut object = json!({
        "addresses": [address.ip()],
        "conditions": {"ready": ready, "serving": serving, "terminating": terminating},
        "hints": {},
    });
    if let Some(node) = node {
        object["nodeName"] = json!(node);
    }
    if let Some(zone) = for_zone {
        object["hints"]["forZones"] = json!([{"name": zone}]);
    }
    if let Some(node) = for_node {
        object["hints"]["forNodes"] = json!([{"name": node}]);
    }
    object
}

/// A folder with the Node object and these objects.
pub struct Folder(TempDir, Manifests);

impl Folder {
    pub fn new(objects: &[Value]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let manifests = Manifests::at(folder.path()).unwrap();
        let node = json!({
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": NODE, "labels": {"topology.kubernetes.io/zone": ZONE}},
            "spec": {"podCIDRs": ["10.180.0.0/24", "fd00:10::/64"]},
            "status": {"addresses": [
                {"type": "InternalIP", "address": LOCAL[0]},
                {"type": "InternalIP", "address": LOCAL[2]},
            ]},
        });
        manifests.write("node", &[node]).unwrap();
        manifests.write("objects", objects).unwrap();
        Self(folder, manifests)
    }

    /// Adds ServiceCIDRs with these ranges.
    pub fn with_service_cidrs(self, cidrs: &[&str]) -> Self {
        let object = json!({
            "apiVersion": "networking.k8s.io/v1",
            "kind": "ServiceCIDR",
            "metadata": {"name": "kubernetes"},
            "spec": {"cidrs": cidrs},
        });
        self.1.write("service-cidr", &[object]).unwrap();
        self
    }

    pub fn path(&self) -> &Path {
        self.0.path()
    }
}
