//! The cost of a change: what is examined, and what is reported as changed.

use super::*;

/// A change of a Service reports this Service only, however many others there are.
#[test]
fn a_service_changes_its_own_address_health_check_and_warnings_alone() {
    let with = |i: u16| {
        let [high, low] = i.to_be_bytes();
        Service {
            name: name("ns", &format!("s{i}")),
            cluster_ips: vec![Ipv4Addr::new(10, 100, high, low).into()],
            problems: vec![format!("Service ns/s{i} has a problem.")],
            health_check_node_port: 20_000 + i,
            ..service(0, None, 0, 1, Policy::Local)
        }
    };
    let mut index = Index::default();
    for i in 0..10_000 {
        index.apply(Service { load_balancer_ips: Vec::new(), ..with(i) });
        let changes = index.update(&input(1));
        let touched = [changes.ports.len(), changes.cluster_ips.len(), changes.health.len()];
        let warned = if i == 0 { 2 } else { 1 };
        assert_eq!((touched, changes.warned.len()), ([1; 3], warned), "{changes:?}");
    }
    assert_eq!(index.desired().cluster_ips.len(), 10_000);
}

/// Addresses that Services of other proxies gain or lose are looked up once per update, not once
/// per Service.
#[test]
fn services_of_another_proxy_cost_one_look_at_all() {
    let with = |i: u16| {
        let [high, low] = i.to_be_bytes();
        Service {
            foreign: i.is_multiple_of(2),
            name: name("ns", &format!("s{i}")),
            cluster_ips: vec![Ipv4Addr::new(10, 100, high, low).into()],
            ..service(0, None, 0, 1, Policy::Cluster)
        }
    };
    let mut index = Index::default();
    for i in 0..2_000 {
        index.apply(with(i));
    }
    let _ = index.update(&input(1));
    assert_eq!(index.looked_at, 2_000);
    index.apply(with(2_001));
    let _ = index.update(&input(1));
    assert_eq!(index.looked_at, 2_000, "no address of another proxy changed");
}

/// The cost of a change is that of its Service, not of the cluster: one change among ten thousand
/// Services must not take as long as a considerable part of them all.
#[test]
fn one_change_among_ten_thousand_services_is_cheap() {
    let mut index = Index::default();
    for i in 0..10_000u16 {
        let [high, low] = i.to_be_bytes();
        let mut service = service(0, Some(0), 0, 1, Policy::Cluster);
        service.name = name("ns", &format!("service-{i}"));
        service.cluster_ips = vec![Ipv4Addr::new(10, 100, high, low).into()];
        service.load_balancer_ips.clear();
        let mut slice = slice(0, 0, (0..10).map(|last| (last, last == 0, true)).collect());
        slice.name = name("ns", &format!("slice-{i}"));
        slice.service = format!("service-{i}");
        index.apply(service);
        index.apply(slice);
    }
    let started = cpu_time();
    assert_eq!(index.update(&input(1)).ports.len(), 10_000);
    let all = cpu_time() - started;

    let change = |last: u8| {
        let mut changed = slice(0, 0, vec![(last, true, true)]);
        changed.name = name("ns", "slice-77");
        changed.service = "service-77".to_owned();
        let started = cpu_time();
        assert!(index.apply(changed));
        assert_eq!(index.update(&input(1)).ports.len(), 1);
        cpu_time() - started
    };
    // The least of some: an interrupt is charged to the thread that it interrupts.
    let one = (1..=5).map(change).min().unwrap();
    assert!(one * 100 < all, "one change took {one:?}, all Services {all:?}");
}
