//! Memory that objects of a hostile tenant cost the model: bounded by the size of the maps,
//! whatever they ask for.
//!
//! This is a test program of its own with one test, because the allocator counts for all threads.

use std::{
    fs,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use anyhow::Result;
use ipnet::IpNet;
use peak_alloc::PeakAlloc;
use traffic_policy_cluster::{
    model::{
        Index, NodeInput, Protocol, ServiceName,
        object::{EndpointSlice, Port, Service, ServiceType, SliceEndpoint, SlicePort},
    },
    source::Manifests,
};

#[global_allocator]
static ALLOCATED: PeakAlloc = PeakAlloc;

const MIB: usize = 1 << 20;
/// More than the most memory that any one Service that fits into maps of the default sizes costs,
/// and far less than each of these would cost if it were built.
const MOST: usize = 64 * MIB;

fn address(number: u32) -> Ipv4Addr {
    Ipv4Addr::from(u32::from(Ipv4Addr::new(11, 0, 0, 0)) + number)
}

fn name(name: &str) -> ServiceName {
    ServiceName { namespace: "tenant".to_owned(), name: name.to_owned() }
}

/// Returns a Service of type LoadBalancer with `ports` ports, and node ports for as many of them as
/// exist.
fn service(ports: u16) -> Service {
    let ports = (1..=ports).map(|port| Port {
        name: format!("p{port}"),
        protocol: Protocol::Tcp,
        port,
        node_port: if port <= 2768 { 29_999 + port } else { 0 },
    });
    Service {
        service_type: ServiceType::LoadBalancer,
        cluster_ips: vec![Ipv4Addr::new(10, 96, 0, 1).into()],
        ipv4: true,
        ports: ports.collect(),
        ..Service::unserved(name("hostile"))
    }
}

fn slice(number: u32, ports: u16, endpoints: u32) -> EndpointSlice {
    let ports = (1..=ports).map(|port| SlicePort { name: format!("p{port}"), protocol: Protocol::Tcp, port });
    let addresses = (0..endpoints).map(|endpoint| address(number * endpoints + endpoint));
    let endpoints = addresses.map(|address| SliceEndpoint::new(address.into(), Some("here"), true));
    EndpointSlice {
        name: name(&format!("slice-{number}")),
        service: "hostile".to_owned(),
        ports: ports.collect(),
        endpoints: endpoints.collect(),
        ..EndpointSlice::default()
    }
}

fn external_ips(ports: u16, addresses: u32) -> Service {
    Service { external_ips: (0..addresses).map(|i| address(i).into()).collect(), ..service(ports) }
}

/// Adds another Service with the same frontends.
fn also(service: Service) -> [Service; 2] {
    let other = Service { name: name("other"), ..service.clone() };
    [service, other]
}

/// Returns `count` Services of different names, each of which fits alone.
fn many(count: u32, of: impl Fn(u32) -> (Service, Vec<EndpointSlice>)) -> (Vec<Service>, Vec<EndpointSlice>) {
    let mut all = (Vec::new(), Vec::new());
    for number in 0..count {
        let (service, slices) = of(number);
        let service =
            Service { name: name(&format!("hostile-{number}")), created: Some(number.into()), ..service };
        let slices = slices.into_iter().enumerate().map(|(i, slice)| EndpointSlice {
            name: name(&format!("slice-{number}-{i}")),
            service: service.name.name.clone(),
            ..slice
        });
        all.1.extend(slices);
        all.0.push(service);
    }
    all
}

/// Many Services, and the most memory that they may cost together, in MiB: about twice what they
/// do.
struct Crowd {
    what: &'static str,
    most: usize,
    services: Vec<Service>,
    slices: Vec<EndpointSlice>,
}

/// Returns a tenant's hundreds of Services, each just below what a map takes, and one that was
/// there before.
fn crowds() -> Vec<Crowd> {
    let frontends = many(14, |number| {
        let external_ips = (0..250).map(|i| address(number * 250 + i).into()).collect();
        (Service { external_ips, ..service(250) }, Vec::new())
    });
    let endpoints = many(14, |_| (service(100), vec![slice(0, 100, 1000), slice(1, 100, 1000)]));
    let ranges = many(14, |_| {
        let source_ranges = (0..600).map(|i| IpNet::from(IpAddr::V4(address(i)))).collect();
        (Service { source_ranges, ..service(100) }, Vec::new())
    });
    let dual = many(14, |number| {
        let (service, mut slices) = (service(100), vec![slice(0, 100, 1000), slice(1, 100, 1000)]);
        slices.extend((0..2).map(|half| {
            let mut slice = EndpointSlice { ipv6: true, ..slice(half, 100, 1000) };
            for (i, endpoint) in (0u16..).zip(&mut slice.endpoints) {
                endpoint.address = Ipv6Addr::new(0xfd00, 0, 0, 0, 0, number as u16, half as u16, i).into();
            }
            slice
        }));
        let external_ips =
            (0..250).map(|i| IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, number as u16, i)));
        let external_ips = external_ips.chain((0..250).map(|i| address(number * 250 + i).into())).collect();
        (Service { ipv6: true, external_ips, ..service }, slices)
    });
    let crowds = [
        ("frontends", 70, frontends),
        ("endpoints", 82, endpoints),
        ("source ranges", 10, ranges),
        ("both families", 192, dual),
    ];
    let old = Service {
        name: name("old"),
        created: Some(-1),
        cluster_ips: vec![address(0xF000).into()],
        ..service(1)
    };
    crowds
        .into_iter()
        .map(|(what, most, (mut services, slices))| {
            services.push(old.clone());
            Crowd { what, most, services, slices }
        })
        .collect()
}

struct Row {
    what: &'static str,
    services: Vec<Service>,
    slices: Vec<EndpointSlice>,
    served: bool,
}

fn row(what: &'static str, service: Service, slices: Vec<EndpointSlice>, served: bool) -> Row {
    Row { what, services: vec![service], slices, served }
}

fn rows() -> Vec<Row> {
    let ingress =
        Service { load_balancer_ips: (0..2000).map(|i| address(i).into()).collect(), ..service(2000) };
    let ranges = Service {
        source_ranges: (0..10_000).map(|i| IpNet::from(IpAddr::V4(address(i)))).collect(),
        ..service(10_000)
    };
    vec![
        row("external IPs and ports", external_ips(2000, 2000), vec![slice(0, 1, 1)], false),
        row("ingress addresses and ports", ingress, vec![slice(0, 1, 1)], false),
        row("source ranges and ports", ranges, vec![slice(0, 1, 1)], false),
        row("ports in one slice", service(20_000), vec![slice(0, 20_000, 1000)], false),
        row("slices", service(100), (0..40).map(|number| slice(number, 100, 1000)).collect(), false),
        row("as many frontends as fit", external_ips(250, 258), vec![slice(0, 1, 1)], true),
        row("as many endpoints as fit", service(100), vec![slice(0, 100, 1000), slice(1, 100, 1000)], true),
        row("ports alone", service(20_000), vec![slice(0, 20_000, 1)], true),
        Row {
            what: "the frontends of another",
            services: also(external_ips(250, 258)).to_vec(),
            slices: Vec::new(),
            served: true,
        },
    ]
}

fn input() -> NodeInput {
    NodeInput {
        node_name: "here".to_owned(),
        node_port_addresses: vec![Ipv4Addr::new(192, 0, 2, 1).into()],
        ipv4: true,
        ipv6: true,
        ..NodeInput::default()
    }
}

/// Returns the most memory that an update of the model takes, in bytes.
fn peak(index: &mut Index) -> usize {
    let before = ALLOCATED.current_usage();
    ALLOCATED.reset_peak_usage();
    let _ = index.update(&input());
    ALLOCATED.peak_usage() - before
}

/// Returns an index with an object whose annotation is as large as the API server takes and is not
/// a duration.
fn annotated() -> Result<Index> {
    let folder = tempfile::tempdir()?;
    let text = "\\u0001".repeat(256 * 1024);
    let manifest = format!(
        r#"{{"apiVersion": "v1", "kind": "Service",
            "metadata": {{"name": "web", "annotations": {{"traffic-policy.io/drain": "{text}"}}}},
            "spec": {{"clusterIP": "10.96.0.1", "ports": [{{"port": 80}}]}}}}"#
    );
    fs::write(folder.path().join("web.json"), manifest)?;
    let manifests = Manifests { folder: folder.path().to_owned(), node_name: "here".to_owned() };
    let mut index = Index::default();
    manifests.read()?.apply(&mut index);
    Ok(index)
}

#[test]
fn cost_no_more_than_the_maps_hold() {
    for Row { what, services, slices, served } in rows() {
        let mut index = Index::default();
        for service in services {
            index.apply(service);
        }
        for slice in slices {
            index.apply(slice);
        }
        let peak = peak(&mut index);
        assert!(peak < MOST, "{what}: {} MiB", peak / MIB);
        let desired = index.desired();
        assert_eq!(!desired.ports.is_empty(), served, "{what}");
    }

    for Crowd { what, most, services, slices } in crowds() {
        let count = services.len();
        let mut index = Index::default();
        for service in services {
            index.apply(service);
        }
        for slice in slices {
            index.apply(slice);
        }
        let peak = peak(&mut index);
        assert!(peak < most * MIB, "{what}: {} MiB", peak / MIB);
        let desired = index.desired();
        let refused = desired.refused.len();
        assert!(refused > 0 && refused < count, "{what}: {refused} of {count}");
        // Each has one warning, and the old one is served.
        let is_refused = |service: &ServiceName| desired.refused.contains_key(service);
        let said = desired.warnings.iter().filter(|warning| warning.service.as_ref().is_some_and(is_refused));
        assert_eq!(said.count(), refused, "{what}");
        assert!(desired.ports.keys().any(|key| key.service == name("old")), "{what}");
    }

    let mut index = annotated().unwrap();
    let peak = peak(&mut index);
    assert!(peak < MIB, "an annotation: {peak} bytes");
    let warnings: Vec<_> = index.desired().warnings.iter().collect();
    assert!(matches!(warnings[..], [warning] if warning.text.len() < 1024), "{warnings:?}");
}
