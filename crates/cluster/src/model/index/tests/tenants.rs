//! Tenants with high demands: many Services, addresses or endpoints, or an address that many others
//! claim, too.

use super::*;

/// Returns a Service with `addresses` external IPs, created at `created`.
fn greedy(i: u8, created: i64, addresses: u8) -> Service {
    let external_ips = (0..addresses).map(|last| Ipv4Addr::new(198, 51, i, last).into()).collect();
    let ports = vec![Port { name: String::new(), protocol: Protocol::Tcp, port: 80, node_port: 0 }];
    Service {
        external_ips,
        ports,
        load_balancer_ips: Vec::new(),
        ..service(i, Some(created), 0, 1, Policy::Cluster)
    }
}

/// Returns an input under which all Services together may ask for 40 frontends.
fn few_frontends() -> NodeInput {
    NodeInput { limits: Limits { frontends: [20; 2], ..Limits::default() }, ..input(0) }
}

fn served(index: &Index) -> Vec<String> {
    index.desired().ports.keys().map(|key| key.service.name.clone()).collect()
}

/// If all Services together ask for more than twice the capacity of the maps, the oldest are
/// served.
#[test]
fn a_tenants_new_services_lose() {
    let input = few_frontends();
    let mut index = Index::default();
    index.set_synced();
    // Each needs ten entries, including its cluster IP, which is in the map twice.
    for (i, created) in [(1, 5), (2, 4), (3, 3), (4, 2), (5, 1)] {
        index.apply(greedy(i, created, 8));
    }
    let _ = index.update(&input);
    assert_eq!(served(&index), ["s2", "s3", "s4", "s5"]);
    let warnings: Vec<_> = index.warnings_of(&name("ns", "s1")).collect();
    assert!(matches!(warnings[..], [text] if text.contains("older ones, come first")), "{warnings:?}");
    assert_eq!(index.desired().refused[&name("ns", "s1")].sentence(&name("ns", "s1")), warnings[0]);
    // A change of a waiting Service is not reported again.
    assert!(!index.apply(greedy(1, 5, 8)));
    assert!(index.update(&input).is_empty());

    // Another Service is deleted. A small Service may still fit where an older one does not.
    index.apply(greedy(1, 5, 9));
    index.apply(greedy(6, 6, 0));
    index.delete::<Service>(&name("ns", "s4"));
    let changes = index.update(&input);
    assert_eq!(served(&index), ["s2", "s3", "s5", "s6"]);
    assert!(changes.ports.iter().any(|key| key.service.name == "s6"), "{changes:?}");

    index.delete::<Service>(&name("ns", "s3"));
    let _ = index.update(&input);
    assert_eq!(served(&index), ["s1", "s2", "s5", "s6"]);
    assert!(index.desired().refused.is_empty() && index.warnings().count() == 0);
}

/// No Service that is served is left out because another one grows, however old that one is.
#[test]
fn who_grows_beyond_the_room_loses() {
    let input = few_frontends();
    let mut index = Index::default();
    index.set_synced();
    for (i, created) in [(1, 5), (2, 4), (3, 3), (4, 2), (5, 1)] {
        index.apply(greedy(i, created, 8));
    }
    let _ = index.update(&input);
    index.apply(greedy(5, 1, 16));
    let changes = index.update(&input);
    assert_eq!(served(&index), ["s2", "s3", "s4"]);
    assert!(changes.refused && changes.ports.len() == 1, "{changes:?}");
    // The Service keeps its reserved room.
    index.apply(greedy(5, 1, 8));
    let _ = index.update(&input);
    assert_eq!(served(&index), ["s2", "s3", "s4", "s5"]);
    // Room that another Service frees goes to this growing Service before it goes to waiting ones.
    index.apply(greedy(5, 1, 16));
    let _ = index.update(&input);
    index.delete::<Service>(&name("ns", "s3"));
    let _ = index.update(&input);
    assert_eq!(served(&index), ["s2", "s4", "s5"]);

    // A restarted agent knows no reserved room, so all restarted nodes agree: the oldest come
    // first.
    let mut fresh = from_scratch(&index);
    index.apply(greedy(2, 4, 11));
    fresh.apply(greedy(2, 4, 11));
    let _ = fresh.update(&input);
    fresh.set_synced();
    let _ = fresh.update(&input);
    assert_eq!(served(&fresh), ["s1", "s4", "s5"]);
    let _ = index.update(&input);
    assert_eq!(served(&index), ["s4", "s5"]);
    // Nodes whose own settings change judge by age as well.
    let other = NodeInput { loopback_ipv4: true, ..input };
    let _ = index.update(&other);
    assert_eq!(served(&index), ["s1", "s4", "s5"]);
}

/// However many Services wait, a change does not examine all of them, and a change that concerns
/// all examines each once.
#[test]
fn ten_thousand_who_wait_are_cheap() {
    let waiting = |i: u16| {
        let [high, low] = i.to_be_bytes();
        Service {
            name: name("ns", &format!("s{i}")),
            cluster_ips: vec![Ipv4Addr::new(10, 100, high, low).into()],
            ..greedy(0, i64::from(i), 8)
        }
    };
    let mut index = Index::default();
    index.set_synced();
    for i in 0..10_000 {
        index.apply(waiting(i));
    }
    let judged = |index: &mut Index, input: &NodeInput| {
        index.shares.judged = 0;
        let _ = index.update(input);
        assert_eq!(served(index).len(), 4);
        index.shares.judged
    };
    let input = few_frontends();
    assert_eq!(judged(&mut index, &input), 10_000);
    assert_eq!(judged(&mut index, &NodeInput { loopback_ipv4: true, ..input.clone() }), 10_000);
    assert_eq!(judged(&mut index, &input), 10_000);
    index.apply(Service { external_ips: Vec::new(), ..waiting(9_999) });
    index.apply(Service { external_fallback: true, ..waiting(9_000) });
    index.delete::<Service>(&name("ns", "s9998"));
    assert_eq!(judged(&mut index, &input), 0, "nobody gave room back");
}

/// Serving endpoints are remembered on each node, even where policy Local does not use them.
#[test]
fn a_service_that_serves_more_than_is_remembered_is_refused_alone() {
    let limits = Limits { endpoints: 4, ..Limits::default() };
    let input = NodeInput { limits, ..input(0) };
    let mut index = Index::default();
    let local = Service {
        internal_policy: Policy::Local,
        service_type: ServiceType::ClusterIp,
        load_balancer_ips: Vec::new(),
        ..service(1, Some(1), 0, 1, Policy::Local)
    };
    index.apply(local);
    let far = |count: u8| slice(1, 1, (1..=count).map(|last| (last, false, true)).collect());
    index.apply(far(8));
    let _ = index.update(&input);
    assert!(index.desired().refused.is_empty(), "{:?}", index.desired().refused);
    index.apply(far(9));
    let _ = index.update(&input);
    let refused = index.desired().refused[&name("ns", "s1")].to_string();
    assert!(
        refused.contains("9 IPv4 endpoints that serve") && refused.contains("remembered than 8"),
        "{refused}"
    );
}

/// Entries that are written count, not names: an address that occurs twice, an endpoint in two
/// slices, one that does not serve.
#[test]
fn what_is_named_and_not_written_needs_no_room() {
    let limits = Limits { frontends: [10; 2], source_ranges: [10; 2], endpoints: 4, ..Limits::default() };
    let input = NodeInput { limits, ..input(0) };
    let mut index = Index::default();
    let mut twice = greedy(1, 1, 8);
    twice.external_ips.extend(twice.external_ips.clone());
    twice.source_ranges = vec!["10.0.0.0/8".parse().unwrap(); 20];
    index.apply(twice);
    index.apply(slice(1, 1, vec![(1, false, true), (2, false, true), (3, false, true), (4, false, true)]));
    index.apply(slice(2, 1, vec![(1, false, true), (2, false, true), (3, false, true), (4, false, true)]));
    let not_ready = |last| SliceEndpoint {
        address: Ipv4Addr::new(10, 1, 1, last).into(),
        ready: false,
        serving: false,
        terminating: false,
        ..slice(1, 1, vec![(1, false, true)]).endpoints.remove(0)
    };
    index.apply(EndpointSlice { endpoints: (0..8).map(not_ready).collect(), ..slice(3, 1, Vec::new()) });
    for slice in index.slices.values_mut() {
        slice.ports[0].name = String::new();
    }
    let _ = index.update(&input);
    assert!(index.desired().refused.is_empty(), "{:?}", index.desired().refused);
    assert_eq!(index.desired().ports.values().next().unwrap().cluster.len(), 4);

    // Everything that is named has to be examined, so that is limited, too.
    let mut more = slice(4, 1, vec![(1, false, true)]);
    more.ports[0].name = String::new();
    index.apply(more);
    let _ = index.update(&input);
    let refused = index.desired().refused[&name("ns", "s1")].to_string();
    assert!(refused.contains("lists 17 IPv4 endpoints") && refused.contains("16"), "{refused}");
}

/// Many Services claim one address: a change of one concerns few of them.
#[test]
fn ten_thousand_claimants_of_one_address_are_cheap() {
    let claimant = |i: u16, addresses: bool| {
        let [high, low] = i.to_be_bytes();
        let external_ips = if addresses { vec![Ipv4Addr::new(198, 51, 100, 1).into()] } else { Vec::new() };
        Service {
            name: name("ns", &format!("s{i}")),
            cluster_ips: vec![Ipv4Addr::new(10, 100, high, low).into()],
            external_ips,
            ..greedy(0, i64::from(i), 0)
        }
    };
    let mut index = Index::default();
    for i in 0..10_000 {
        index.apply(claimant(i, true));
    }
    let settled = std::cell::Cell::new(0);
    let _ = index.update_with(&input(0), &|| settled.set(settled.get() + 1));
    for change in [claimant(0, false), claimant(0, true), claimant(5_000, false), claimant(9_999, false)] {
        settled.set(0);
        index.apply(change);
        let _ = index.update_with(&input(0), &|| settled.set(settled.get() + 1));
        assert!(settled.get() <= 12, "{} Services", settled.get());
    }
}
