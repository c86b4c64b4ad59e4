mod cost;
mod direct_changes;
mod direct_targets;
mod recent;
mod tenants;

use std::{net::Ipv4Addr, time::Duration};

use nix::time::{ClockId, clock_gettime};
use proptest::prelude::*;

use super::*;
use crate::model::{
    Limits, Policy, Protocol, ServicePortKey,
    object::{Port, ServiceType, SliceEndpoint, SlicePort},
    render,
};

fn name(namespace: &str, name: &str) -> ServiceName {
    ServiceName { namespace: namespace.to_owned(), name: name.to_owned() }
}

fn service(i: u8, created: Option<i64>, node_port: u16, vip: u8, external_policy: Policy) -> Service {
    Service {
        created,
        service_type: ServiceType::LoadBalancer,
        cluster_ips: vec![Ipv4Addr::new(10, 96, 0, i).into()],
        ipv4: true,
        load_balancer_ips: vec![Ipv4Addr::new(192, 0, 2, vip).into()],
        ports: vec![Port { name: "web".to_owned(), protocol: Protocol::Tcp, port: 80, node_port }],
        external_policy,
        health_check_node_port: 32_000,
        ..Service::unserved(name("ns", &format!("s{i}")))
    }
}

fn slice(i: u8, of: u8, endpoints: Vec<(u8, bool, bool)>) -> EndpointSlice {
    EndpointSlice {
        name: name("ns", &format!("slice{i}")),
        service: format!("s{of}"),
        ports: vec![SlicePort { name: "web".to_owned(), protocol: Protocol::Tcp, port: 8080 }],
        endpoints: endpoints
            .into_iter()
            .map(|(last, here, ready)| {
                SliceEndpoint::new(Ipv4Addr::new(10, 1, 0, last).into(), here.then_some("here"), ready)
            })
            .collect(),
        ..EndpointSlice::default()
    }
}

fn node(zone: Option<u8>, leaving: bool) -> Node {
    Node {
        name: "here".to_owned(),
        addresses: vec![Ipv4Addr::new(192, 0, 2, 100).into()],
        zone: zone.map(|zone| format!("zone-{zone}")),
        leaving,
        ..Node::default()
    }
}

fn input(addresses: u8) -> NodeInput {
    NodeInput {
        node_name: "here".to_owned(),
        node_port_addresses: (0..addresses).map(|i| Ipv4Addr::new(192, 0, 2, 100 + i).into()).collect(),
        loopback_ipv4: addresses > 0,
        ipv4: true,
        ..NodeInput::default()
    }
}

/// Returns the CPU time of this thread, from which other work of a busy machine takes nothing.
fn cpu_time() -> Duration {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).unwrap().into()
}

/// A Service of many ports must not cost more for each of them.
#[test]
fn the_cost_of_a_service_grows_with_its_ports() {
    let cost = |ports: u16| {
        let number = 1..=ports;
        let names = number.map(|port| (format!("p{port}"), port));
        let ports =
            names.clone().map(|(name, port)| Port { name, protocol: Protocol::Tcp, port, node_port: 0 });
        let big = Service { ports: ports.collect(), ..service(1, None, 0, 1, Policy::Cluster) };
        let ports = names.map(|(name, port)| SlicePort { name, protocol: Protocol::Tcp, port });
        let slice = EndpointSlice { ports: ports.collect(), ..slice(1, 1, vec![(1, true, true)]) };
        let mut index = Index::default();
        index.apply(big);
        index.apply(slice);
        let before = cpu_time();
        let _ = index.update(&input(1));
        cpu_time() - before
    };
    let least = |ports| (0..3).map(|_| cost(ports)).min().unwrap();
    let (few, many) = (least(1_000), least(10_000));
    assert!(many < few * 30, "1,000 ports: {few:?}, 10,000: {many:?}");
}

/// Nodes come and go for years; only this node's own Node is remembered.
#[test]
fn other_nodes_that_are_gone_are_forgotten() {
    let mut index = Index::default();
    let mut names: Vec<_> = (0..100).map(|i| format!("node-{i}")).collect();
    names.push("here".to_owned());
    for name in names {
        index.apply(Node { name: name.clone(), ..node(None, false) });
        let _ = index.update(&input(1));
        index.delete::<Node>(&ServiceName { namespace: String::new(), name });
        let _ = index.update(&input(1));
    }
    assert_eq!(index.deleted_nodes.keys().collect::<Vec<_>>(), ["here"]);
    assert_eq!(index.node_addresses("here"), node(None, false).addresses);
}

/// Long updates give signs of life.
#[test]
fn an_update_beats_for_each_service() {
    let mut index = Index::default();
    for i in 0..3 {
        index.apply(service(i, None, 30_000, i, Policy::Cluster));
    }
    let beats = std::cell::Cell::new(0);
    let _ = index.update_with(&input(1), &|| beats.set(beats.get() + 1));
    assert!(beats.get() >= 3, "{}", beats.get());
}

fn service_cidr(i: u8, third: u8) -> ServiceCidr {
    let cidr = IpNet::new(Ipv4Addr::new(10, 96, third, 0).into(), 24).unwrap();
    let problems = (third == 0).then(|| format!("ServiceCIDR c{i} is odd.")).into_iter().collect();
    ServiceCidr { name: format!("c{i}"), cidrs: vec![cidr], problems }
}

#[derive(Clone, Debug)]
enum Op {
    Service(Service),
    DeleteService(u8),
    ResetServices(Vec<Service>),
    Slice(EndpointSlice),
    DeleteSlice(u8),
    Node(Node),
    DeleteNode,
    ServiceCidr(ServiceCidr),
    DeleteServiceCidr(u8),
    Input(u8),
    Update,
}

fn any_service() -> impl Strategy<Value = Service> {
    let policy = prop_oneof![Just(Policy::Cluster), Just(Policy::Local)];
    let annotation = prop::option::of(prop::sample::select(vec![30_000u16, 31_999, 32_000]));
    (0u8..4, prop::option::of(0i64..3), 30_000u16..30_002, 1u8..3, policy, annotation).prop_map(
        |(i, created, node_port, vip, policy, annotation)| {
            let service = service(i, created, node_port, vip, policy);
            match annotation {
                None => service,
                Some(port) => Service {
                    service_type: ServiceType::NodePort,
                    load_balancer_ips: Vec::new(),
                    health_annotation: port,
                    ..service
                },
            }
        },
    )
}

fn op() -> impl Strategy<Value = Op> {
    let endpoints = prop::collection::vec((0u8..4, any::<bool>(), any::<bool>()), 0..4);
    prop_oneof![
        3 => any_service().prop_map(Op::Service),
        1 => (0u8..4).prop_map(Op::DeleteService),
        1 => prop::collection::vec(any_service(), 0..3).prop_map(Op::ResetServices),
        3 => (0u8..4, 0u8..4, endpoints).prop_map(|(i, of, endpoints)| Op::Slice(slice(i, of, endpoints))),
        1 => (0u8..4).prop_map(Op::DeleteSlice),
        1 => (prop::option::of(0u8..2), any::<bool>()).prop_map(|(zone, leaving)| Op::Node(node(zone, leaving))),
        1 => Just(Op::DeleteNode),
        1 => (0u8..2, 0u8..3).prop_map(|(i, third)| Op::ServiceCidr(service_cidr(i, third))),
        1 => (0u8..2).prop_map(Op::DeleteServiceCidr),
        1 => (0u8..6).prop_map(Op::Input),
        4 => Just(Op::Update),
    ]
}

/// Builds a new index from the same objects.
fn from_scratch(index: &Index) -> Index {
    let mut fresh = Index::default();
    for service in index.services.values().rev() {
        fresh.apply(service.clone());
    }
    for slice in index.slices.values().rev() {
        fresh.apply(slice.clone());
    }
    for node in index.nodes.values() {
        fresh.apply(node.clone());
    }
    for service_cidr in index.service_cidrs.values() {
        fresh.apply(service_cidr.clone());
    }
    fresh.deleted_nodes = index.deleted_nodes.clone();
    fresh
}

fn port_changes(before: &Desired, after: &Desired) -> BTreeSet<ServicePortKey> {
    let keys = before.ports.keys().chain(after.ports.keys());
    keys.filter(|key| before.ports.get(key) != after.ports.get(key)).cloned().collect()
}

proptest! {
    /// The result depends on the objects alone, however the index reached them; and the index
    /// reports exactly what it changed.
    #[test]
    fn incremental_is_from_scratch(ops in prop::collection::vec(op(), 1..40)) {
        let mut index = Index::default();
        let mut now = input(1);
        let mut told_unchanged = true;
        let _ = index.update(&now);
        for op in ops.into_iter().chain([Op::Update]) {
            told_unchanged &= !match op {
                Op::Service(service) => index.apply(service),
                Op::DeleteService(i) => index.delete::<Service>(&name("ns", &format!("s{i}"))),
                Op::ResetServices(services) => index.reset(services, &[]),
                Op::Slice(slice) => index.apply(slice),
                Op::DeleteSlice(i) => index.delete::<EndpointSlice>(&name("ns", &format!("slice{i}"))),
                Op::Node(node) => index.apply(node),
                Op::DeleteNode => index.delete::<Node>(&name("", "here")),
                Op::ServiceCidr(service_cidr) => index.apply(service_cidr),
                Op::DeleteServiceCidr(i) => index.delete::<ServiceCidr>(&name("", &format!("c{i}"))),
                Op::Input(addresses) => {
                    let mut next = input(addresses % 3);
                    if addresses >= 3 {
                        // The maps have room for a few of them only.
                        next.limits = Limits { frontends: [6; 2], source_ranges: [6; 2], endpoints: 2, ..Limits::default() };
                    }
                    let before = std::mem::replace(&mut now, next);
                    before != now
                }
                Op::Update => {
                    let before = index.desired().clone();
                    let changes = index.update(&now);
                    let after = index.desired();
                    prop_assert!(!told_unchanged || changes.is_empty());
                    prop_assert_eq!(&changes.ports, &port_changes(&before, after));
                    prop_assert_eq!(&changes.health, &differing(&before.health, &after.health));
                    let ips = |desired: &Desired| -> BTreeMap<IpAddr, ()> {
                        desired.cluster_ips.keys().map(|address| (*address, ())).collect()
                    };
                    prop_assert!(changes.cluster_ips.is_superset(&differing(&ips(&before), &ips(after))));
                    prop_assert_eq!(changes.node_eligible, before.node_eligible != after.node_eligible);
                    prop_assert_eq!(changes.service_cidrs, before.service_cidrs != after.service_cidrs);
                    prop_assert_eq!(changes.warnings, before.warnings != after.warnings);
                    prop_assert_eq!(&changes.warned, &(&after.warnings - &before.warnings));
                    let mut fresh = from_scratch(&index);
                    let _ = fresh.update(&now);
                    prop_assert_eq!(render(after), render(fresh.desired()));
                    prop_assert_eq!(after, fresh.desired());
                    told_unchanged = true;
                    false
                }
            };
        }
    }

    /// The packet path has one entry for each address, port and protocol.
    #[test]
    fn each_frontend_has_one_service(services in prop::collection::vec(any_service(), 0..6)) {
        let mut index = Index::default();
        for service in services {
            index.apply(service);
        }
        let _ = index.update(&input(2));
        let mut seen = BTreeSet::new();
        for (key, port) in &index.desired().ports {
            for frontend in &port.frontends {
                prop_assert!(seen.insert((frontend.address, key.protocol)), "{frontend:?} twice");
            }
        }
        // No address is lost: each address that a Service names belongs to a Service.
        for service in index.services.values() {
            for ip in service.cluster_ips.iter().chain(&service.load_balancer_ips) {
                prop_assert!(seen.iter().any(|(address, _)| address.ip() == *ip));
            }
        }
    }
}

/// A health port that an annotation gives is answered only if no use takes precedence.
#[test]
fn each_health_port_of_an_annotation_has_one_service() {
    let annotated = |i, created, port| Service {
        service_type: ServiceType::NodePort,
        health_annotation: port,
        load_balancer_ips: Vec::new(),
        ..service(i, created, 30_000 + u16::from(i), 1, Policy::Local)
    };
    let mut index = Index::default();
    let ports = |index: &Index| -> Vec<(String, u16)> {
        index.desired().health.iter().map(|(name, health)| (name.name.clone(), health.port)).collect()
    };
    index.apply(annotated(1, Some(2), 31_999));
    let _ = index.update(&input(1));
    assert_eq!(ports(&index), [("s1".to_owned(), 31_999)]);
    // The older Service holds it, whenever it is added.
    index.apply(annotated(2, Some(1), 31_999));
    assert_eq!(index.update(&input(1)).health, [name("ns", "s1"), name("ns", "s2")].into());
    assert_eq!(ports(&index), [("s2".to_owned(), 31_999)]);
    let said: Vec<_> = index.warnings_of(&name("ns", "s1")).collect();
    assert!(
        said[0].contains("\"31999\" is, by the same annotation, the health port of Service ns/s2"),
        "{said:?}"
    );
    assert!(index.reach(&name("ns", "s1")).unwrap().health.is_none());
    // A node port takes precedence over both.
    index.apply(service(3, None, 31_999, 2, Policy::Cluster));
    let _ = index.update(&input(1));
    assert_eq!(ports(&index), []);
    assert_eq!(index.warnings().map(|(_, count)| count).sum::<usize>(), 2);
    index.delete::<Service>(&name("ns", "s3"));
    index.delete::<Service>(&name("ns", "s2"));
    let _ = index.update(&input(1));
    assert_eq!(ports(&index), [("s1".to_owned(), 31_999)]);
    // The rules of the node forbid the port.
    let rules =
        crate::model::HealthPortRules { own: vec![(31_999, "--healthz-address")], ..Default::default() };
    let _ = index.update(&NodeInput { health_ports: rules, ..input(1) });
    assert_eq!(ports(&index), []);
    assert!(index.warnings_of(&name("ns", "s1")).next().unwrap().contains("(--healthz-address)"));
}

#[test]
fn an_object_that_is_unreadable_after_a_relist_stays() {
    let mut index = Index::default();
    index.apply(service(1, None, 30_000, 1, Policy::Local));
    index.apply(service(2, None, 30_001, 2, Policy::Local));
    assert!(!index.reset(vec![service(1, None, 30_000, 1, Policy::Local)], &[name("ns", "s2")]));
    assert!(index.reset(vec![service(1, None, 30_000, 1, Policy::Local)], &[]));
    let _ = index.update(&input(1));
    assert_eq!(index.desired().ports.len(), 1);
}

#[test]
fn a_deleted_node_keeps_its_node_ports_and_is_not_eligible() {
    let mut index = Index::default();
    index.apply(node(None, false));
    index.apply(service(1, None, 30_000, 1, Policy::Cluster));
    let own =
        |index: &Index| NodeInput { node_port_addresses: index.node_addresses("here").to_vec(), ..input(0) };
    let _ = index.update(&own(&index));
    assert!(index.desired().node_eligible);
    assert!(index.delete::<Node>(&name("", "here")));
    let changes = index.update(&own(&index));
    assert!(changes.ports.is_empty(), "{changes:?}");
    assert!(!index.desired().node_eligible);
    assert!(changes.warnings, "it is told");
}

/// Returns the keys whose values differ, or that are in one of the maps only.
fn differing<K: Ord + Clone, V: PartialEq>(before: &BTreeMap<K, V>, after: &BTreeMap<K, V>) -> BTreeSet<K> {
    let differs = |key: &&K| before.get(key) != after.get(key);
    before.keys().chain(after.keys()).filter(differs).cloned().collect()
}
