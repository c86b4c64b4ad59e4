//! Tests of plans that find no room: the Service ports that are left out, and the entries that
//! stay.

use std::net::SocketAddr;

use super::*;

fn addresses(count: u8) -> ServicePort {
    let address = |number| traffic_policy_cluster::model::Frontend {
        address: SocketAddr::from(([198, 51, 100, number], 80)),
        kind: FrontendKind::ExternalIp,
    };
    ServicePort {
        frontends: (0..count).map(address).collect(),
        ..port(A, Policy::Cluster, &[endpoint("10.0.0.1:80", false)])
    }
}

/// Large Services leave the last eighth to small ones; a Service port without room changes nothing.
#[test]
fn without_room_for_frontends_one_port_is_left_out() {
    let mut node = Node::new();
    let plan = node.set("greedy", Some(addresses(89)));
    assert_eq!((keys(&plan), &plan.ops), (vec![key("greedy")], &vec![]));
    assert_eq!(plan.left_out[0].lack, Lack::Frontends { needed: 89, free: 88 });
    assert!(node.set("greedy", Some(addresses(88))).left_out.is_empty());
    for number in 0..12 {
        let plan = node.set(
            &format!("small{number}"),
            Some(port(&format!("192.0.2.1:{}", 30000 + number), Policy::Cluster, &[])),
        );
        assert!(plan.left_out.is_empty(), "{number}: {plan:?}");
    }
    let plan = node.set("late", Some(port(B, Policy::Cluster, &[])));
    assert_eq!((keys(&plan), &plan.ops), (vec![key("late")], &vec![]));
    // The other family has its own room.
    let six = ServicePortKey { ipv6: true, ..key("late") };
    node.desired.ports.insert(six.clone(), port("[2001:db8::1]:80", Policy::Cluster, &[]).into());
    assert!(node.plan(&[six]).left_out.is_empty());
    // A removed Service port makes room for a new one in the same plan.
    node.desired.ports.remove(&key("small0"));
    let plan = node.plan(&[key("small0"), key("late")]);
    assert!(plan.left_out.is_empty(), "{plan:?}");
    let place = |wanted: fn(&Op) -> bool| plan.ops.iter().position(wanted).unwrap();
    assert!(
        place(|op| matches!(op, Op::DeleteFrontend(_))) < place(|op| matches!(op, Op::SetFrontend(..))),
        "{plan:?}"
    );
    assert_eq!(node.planner.usage().frontends, [100, 1]);
    // An agent that takes over finds the maps as full as before.
    node.restart();
    assert_eq!(node.plan(&[]).ops, []);
    let plan = node.set("last", Some(port(A, Policy::Cluster, &[])));
    assert_eq!(plan.left_out[0].lack, Lack::Frontends { needed: 1, free: 0 });
}

/// A Service that splits its addresses over many small ports demands as much as one with all of
/// them in one port.
#[test]
fn many_small_ports_of_one_service_leave_room_for_others() {
    for ipv6 in [false, true] {
        let mut node = Node::new();
        let ports: Vec<_> =
            (0..40).map(|n| ServicePortKey { port: format!("p{n}"), ipv6, ..key("a") }).collect();
        for (number, key) in ports.iter().enumerate() {
            let frontends = (0..5).map(|address| traffic_policy_cluster::model::Frontend {
                address: if ipv6 {
                    format!("[2001:db8::{address}]:{}", 1000 + number).parse().unwrap()
                } else {
                    format!("198.51.100.{address}:{}", 1000 + number).parse().unwrap()
                },
                kind: FrontendKind::ExternalIp,
            });
            let port = ServicePort { frontends: frontends.collect(), ..port(A, Policy::Cluster, &[]) };
            node.desired.ports.insert(key.clone(), port.into());
        }
        let plan = node.plan(&ports);
        let family = usize::from(ipv6);
        assert_eq!((plan.left_out.len(), node.planner.usage().frontends[family]), (40 - 17, 85));
        assert!(matches!(plan.left_out[0].lack, Lack::Frontends { needed: 5, free: 3 }), "{plan:?}");
        let other = if ipv6 { "[2001:db8::9]:80" } else { VIP };
        let small = ServicePortKey { ipv6, ..key("small") };
        node.desired.ports.insert(small.clone(), port(other, Policy::Cluster, &[]).into());
        assert!(node.plan(&[small]).left_out.is_empty());
        // Adding one port after the other does not help either.
        assert_eq!(keys(&node.plan(&[ports[39].clone()])), [ports[39].clone()]);
    }
}

/// The same holds for the source ranges of a Service, of which each of its ports has its own
/// entries.
#[test]
fn source_ranges_of_many_ports_leave_room_for_others() {
    let ranges: Vec<String> = (0..9).map(|number| format!("198.51.{number}.0/24")).collect();
    let ranges: Vec<&str> = ranges.iter().map(String::as_str).collect();
    let mut node = Node::new();
    let at = |number: u16| {
        let address = SocketAddr::from(([203, 0, 113, 1], number));
        let frontends =
            [traffic_policy_cluster::model::Frontend { address, kind: FrontendKind::LoadBalancer }].into();
        ServicePort { frontends, ..guarded(&[], &ranges) }
    };
    let ports: Vec<_> = (0..12).map(|n| ServicePortKey { port: format!("p{n}"), ..key("a") }).collect();
    for (number, key) in ports.iter().enumerate() {
        node.desired.ports.insert(key.clone(), at(1000 + number as u16).into());
    }
    let plan = node.plan(&ports);
    assert_eq!((plan.left_out.len(), node.planner.usage().source_ranges), (3, [81, 0]));
    assert!(node.set("small", Some(at(80))).left_out.is_empty());
}

#[test]
fn without_room_for_source_ranges_one_port_is_left_out() {
    let ranges: Vec<String> = (0..60).map(|number| format!("198.51.{number}.0/24")).collect();
    let ranges: Vec<&str> = ranges.iter().map(String::as_str).collect();
    let mut node = Node::new();
    assert!(node.set("a", Some(guarded(&[], &ranges[..50]))).left_out.is_empty());
    let other = |ranges: &[&str]| {
        let address = "203.0.113.2:80".parse().unwrap();
        let frontends =
            [traffic_policy_cluster::model::Frontend { address, kind: FrontendKind::LoadBalancer }].into();
        Some(ServicePort { frontends, ..guarded(&[], ranges) })
    };
    let plan = node.set("b", other(&ranges[..39]));
    assert_eq!((keys(&plan), &plan.ops), (vec![key("b")], &vec![]));
    assert_eq!(plan.left_out[0].lack, Lack::SourceRanges { needed: 39, free: 38 });
    // The first one frees more than the other needs. Its ranges are removed last, so the other is
    // served by the next plan.
    node.desired.ports.insert(key("a"), guarded(&[], &ranges[..10]).into());
    assert_eq!(keys(&node.plan(&[key("a"), key("b")])), [key("b")]);
    assert!(node.plan(&[key("b")]).left_out.is_empty());
    assert_eq!(node.planner.usage().source_ranges, [49, 0]);
}

/// A health check may only report local endpoints that the maps hold for all of the port's
/// frontends.
#[test]
fn of_a_port_without_room_only_what_is_written_counts() {
    let local =
        |count: u8| -> Vec<_> { (0..count).map(|i| endpoint(&format!("10.0.0.{i}:80"), true)).collect() };
    let mut node = Node::new();
    let _ = node.set("a", Some(port(A, Policy::Local, &local(20))));
    let plan = node.set("a", Some(port(A, Policy::Local, &local(90)[18..])));
    assert_eq!(plan.left_out[0].local_endpoints, 2);
    let mut moved = port(B, Policy::Local, &local(90));
    moved.frontends.extend(port(A, Policy::Local, &[]).frontends);
    assert_eq!(node.set("a", Some(moved)).left_out[0].local_endpoints, 0, "one of its frontends is nowhere");
    assert_eq!(node.set("b", Some(port(B, Policy::Local, &local(90)))).left_out[0].local_endpoints, 0);
}

/// A frontend that moved to another Service is not deleted when the one that lost it changes again.
#[test]
fn what_went_over_to_another_stays_with_it() {
    let many: Vec<_> = (0..60).map(|i| endpoint(&format!("10.0.0.{i}:80"), false)).collect();
    let mut node = Node::new();
    let _ = node.set("a", Some(port(A, Policy::Cluster, &many)));
    let more: Vec<_> = (0..90).map(|i| endpoint(&format!("10.0.1.{i}:80"), false)).collect();
    node.desired.ports.insert(key("a"), port(B, Policy::Cluster, &more).into());
    node.desired.ports.insert(key("b"), port(A, Policy::Cluster, &many[..1]).into());
    assert_eq!(keys(&node.plan(&[key("a"), key("b")])), [key("a")]);
    let of_b = node.frontend(A);
    let _ = node.set("a", None);
    assert_eq!(node.frontend(A), of_b);
}

/// ClusterIPs are entries of the same map. One that finds no room is written as soon as there is
/// some.
#[test]
fn cluster_ips_find_room_later() {
    let mut node = Node::new();
    for number in 0..4 {
        let ip: IpAddr = format!("10.96.0.{number}").parse().unwrap();
        node.set_cluster_ip(ip, true);
    }
    let _ = node.set("a", Some(addresses(16)));
    for number in 0..80 {
        let _ = node.set(
            &format!("s{number}"),
            Some(port(&format!("192.0.2.1:{}", 30000 + number), Policy::Cluster, &[])),
        );
    }
    assert_eq!(node.planner.usage().frontends, [100, 0]);
    let ip: IpAddr = "10.96.0.9".parse().unwrap();
    node.set_cluster_ip(ip, true);
    assert_eq!(node.plan(&[]).ops, []);
    assert!(node.set("s0", None).ops.contains(&Op::ClusterIp(ip, true)));
}

#[test]
fn without_room_the_old_endpoints_stay() {
    let mut node = Node::new();
    let many: Vec<_> = (0..60).map(|i| endpoint(&format!("10.0.0.{i}:80"), false)).collect();
    let _ = node.set("a", Some(port(A, Policy::Cluster, &many)));
    let before = node.frontend(A);
    let more: Vec<_> = (0..70).map(|i| endpoint(&format!("10.0.1.{i}:80"), false)).collect();
    let plan = node.set("a", Some(port(A, Policy::Cluster, &more)));
    assert_eq!(keys(&plan), [key("a")]);
    assert_eq!(node.frontend(A), before);
    // A smaller list fits, and so does another Service.
    assert!(node.set("b", Some(port(B, Policy::Cluster, &many[..30]))).left_out.is_empty());
}

/// A Service that never found room must not use up the indices of others.
#[test]
fn without_room_no_index_is_kept() {
    let mut node = Node::new();
    let many: Vec<_> = (0..101).map(|i| endpoint(&format!("10.0.0.{i}:80"), false)).collect();
    for _ in 0..2 * CAPACITY.services {
        let plan = node.set("a", Some(port(A, Policy::Cluster, &many)));
        assert_eq!(keys(&plan), [key("a")]);
        node.now += Duration::from_secs(2);
    }
    assert!(node.set("b", Some(port(B, Policy::Cluster, &many[..1]))).left_out.is_empty());
}

/// Entries of an earlier agent continue to serve unchanged, with their source ranges, without which
/// every client would be dropped.
#[test]
fn without_room_at_a_takeover_everything_stays() {
    let mut node = Node::new();
    let many = |net: u8, count: u8| -> Vec<_> {
        (0..count).map(|i| endpoint(&format!("10.0.{net}.{i}:80"), false)).collect()
    };
    let _ = node.set("a", Some(guarded(&many(0, 60), &["198.51.100.0/24"])));
    let (before, used) = (node.frontend(VIP), node.planner.usage());
    node.restart();
    node.desired.ports.insert(key("a"), guarded(&many(1, 70), &["198.51.100.0/24", "192.0.2.0/24"]).into());
    let plan = node.plan(&[]);
    assert_eq!((keys(&plan), &plan.ops), (vec![key("a")], &vec![]));
    assert!(plan.removed.is_empty(), "they still get connections");
    assert_eq!((node.frontend(VIP), node.planner.usage()), (before, used));
    // As soon as it fits, it continues with the same index.
    let _ = node.set("a", Some(guarded(&many(1, 30), &["192.0.2.0/24"])));
    assert_eq!(node.frontend(VIP).service, before.service);
    assert_eq!(node.planner.usage(), Usage { slots: [30, 0], ..used });
}

/// A change writes new slots, and those that it frees are quarantined for a second. Lists under
/// churn, which change with every write, are then written less often, so that there is always room.
#[test]
fn lists_under_churn_find_room() {
    const SLOTS: u32 = 2_621;
    // There are many lists, or one long one; in all of them an endpoint is replaced before each
    // write. The last two write 12,400 slots per round into a map of the default size, which has
    // room for 21 rounds: slots must be used again within 40.
    let scaled = [(4, 5), (32, 5), (1, 160), (1, 1_300), (10, 130)].map(|lists| (SLOTS, 100, lists));
    let whole = [(124, 100), (1, 12_400)].map(|lists| (262_144, 40, lists));
    for (slots, rounds, (services, length)) in scaled.into_iter().chain(whole) {
        let capacity = Capacity { frontends: [200; 2], slots, ..CAPACITY };
        let mut node = Node { planner: Planner::new(Held::default(), capacity), ..Node::new() };
        let names: Vec<_> = (0..services).map(|number| format!("s{number}")).collect();
        let start = node.now;
        for round in 0..rounds {
            for (number, name) in names.iter().enumerate() {
                let address = |i: u32| SocketAddr::from((std::net::Ipv4Addr::from(0x0a00_0000 + i), 80));
                let endpoints = (round..round + length).map(|i| Endpoint::new(address(i), false));
                let endpoints: Vec<_> = endpoints.collect();
                let frontend = format!("192.0.2.1:{}", 30_000 + number);
                node.desired.ports.insert(key(name), port(&frontend, Policy::Cluster, &endpoints).into());
            }
            let changed: Vec<_> = names.iter().map(|name| key(name)).collect();
            let plan = node.plan(&changed);
            assert!(plan.left_out.is_empty(), "{services} of {length}, write {round}: {:?}", plan.left_out);
            let pause = node.planner.pause();
            assert!(pause <= Duration::from_secs(1), "{pause:?}");
            node.now += pause.max(Duration::from_millis(50));
        }
        // Small lists never wait.
        let took = node.now - start;
        let quick = took < Duration::from_secs(6);
        assert!(length * services > 20 || quick, "{services} of {length}: {took:?}");
    }
}

/// No frontend of SCTP is written before its programs are in place, while those of others are.
#[test]
fn without_programs_for_sctp_its_ports_are_left_out() {
    let mut node = Node::new();
    let sctp = ServicePortKey { protocol: Protocol::Sctp, ..key("both") };
    for key in [key("both"), sctp.clone()] {
        let port = port(A, Policy::Cluster, &[endpoint("10.0.0.1:80", false)]);
        node.desired.ports.insert(key, port.into());
    }
    let plan = node.plan(&[]);
    assert_eq!((keys(&plan), plan.left_out[0].lack), (vec![sctp.clone()], Lack::Programs));
    let frontends =
        |node: &Node| -> Vec<Protocol> { node.planner.frontends().keys().map(|id| id.protocol).collect() };
    assert_eq!(frontends(&node), [Protocol::Tcp]);
    let is_frontend = |op: &&Op| matches!(op, Op::SetFrontend(..));
    assert_eq!(plan.ops.iter().filter(is_frontend).count(), 1, "{plan:?}");
    node.sctp = true;
    let plan = node.plan(&[sctp]);
    assert_eq!((keys(&plan), plan.ops.iter().filter(is_frontend).count()), (vec![], 1), "{plan:?}");
    assert_eq!(frontends(&node), [Protocol::Tcp, Protocol::Sctp]);
}
