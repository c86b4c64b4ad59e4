use std::{
    collections::BTreeSet,
    net::Ipv4Addr,
    time::{Duration, Instant},
};

use crate::model::{
    Index, NodeInput, Policy, Protocol, ServiceName, Silent,
    object::{EndpointSlice, LeavingNode, Port, Service, SliceEndpoint, SlicePort},
};

fn service(number: u16, protocol: Protocol) -> Service {
    let [high, low] = number.to_be_bytes();
    let name = ServiceName { namespace: "ns".to_owned(), name: format!("s{number}") };
    Service {
        cluster_ips: vec![Ipv4Addr::new(10, 96, high, low).into()],
        ipv4: true,
        ports: vec![Port { name: String::new(), protocol, port: 80, node_port: 0 }],
        external_policy: Policy::Cluster,
        ..Service::unserved(name)
    }
}

/// A slice with one endpoint on each of these nodes.
fn slice(number: u16, protocol: Protocol, nodes: &[&str]) -> EndpointSlice {
    let [high, low] = number.to_be_bytes();
    let endpoints = nodes.iter().zip(1..).map(|(node, last): (_, u8)| {
        let address = Ipv4Addr::new(10, 100u8.wrapping_add(high), low, last).into();
        SliceEndpoint::new(address, Some(node), true)
    });
    EndpointSlice {
        name: ServiceName { namespace: "ns".to_owned(), name: format!("slice{number}") },
        service: format!("s{number}"),
        ports: vec![SlicePort { name: String::new(), protocol, port: 8080 }],
        endpoints: endpoints.collect(),
        ..EndpointSlice::default()
    }
}

fn input() -> NodeInput {
    NodeInput { node_name: "here".to_owned(), ipv4: true, ipv6: true, ..NodeInput::default() }
}

fn set(names: &[&str]) -> BTreeSet<String> {
    names.iter().map(|&name| name.to_owned()).collect()
}

fn index(of: &[(Protocol, &[&str])]) -> Index {
    let mut index = Index::default();
    for ((protocol, nodes), number) in of.iter().zip(1..) {
        index.apply(service(number, *protocol));
        index.apply(slice(number, *protocol, nodes));
    }
    index.set_synced();
    let _ = index.update(&input());
    index
}

/// The last octets of the endpoints of one Service: for new flows, and for those that exist.
fn lists(index: &Index, number: usize) -> [Vec<u8>; 2] {
    let last = |address: std::net::IpAddr| match address {
        std::net::IpAddr::V4(address) => address.octets()[3],
        std::net::IpAddr::V6(_) => 0,
    };
    let (_, port) = index.desired().ports.iter().nth(number).unwrap();
    [
        port.cluster.iter().map(|endpoint| last(endpoint.address.ip())).collect(),
        port.serving.iter().map(|address| last(address.ip())).collect(),
    ]
}

#[test]
fn only_services_with_endpoints_on_the_node_change_and_back_again() {
    let both = &["here", "far"][..];
    let of = [
        (Protocol::Tcp, both),
        (Protocol::Udp, both),
        (Protocol::Tcp, &["near", "here"]),
        (Protocol::Udp, &["far"]),
    ];
    let mut index = index(&of);
    let whole = index.desired().clone();
    assert!(index.leave_out(set(&["far"])));
    assert!(!index.leave_out(set(&["far"])), "already");
    assert_eq!(index.dirty.len(), 3, "the third has no endpoint there");
    let changes = index.update(&input());
    let changed: Vec<_> = changes.ports.iter().map(|key| key.service.name.as_str()).collect();
    assert_eq!(changed, ["s1", "s2"], "the only endpoint of the fourth stays");
    assert_eq!(lists(&index, 0), [vec![1], vec![1, 2]], "TCP flows stay");
    assert_eq!(lists(&index, 1), [vec![1], vec![1]], "UDP flows move");
    assert_eq!(lists(&index, 3), [vec![1], vec![1]], "the last endpoint");
    assert_eq!(index.left_out().collect::<Vec<_>>(), ["far"]);
    let left_out: Vec<_> = index.left_out_endpoints().into_values().flatten().collect();
    let of_far = |address: &str| (address.parse().unwrap(), Some("far".to_owned()));
    assert_eq!(left_out, [of_far("10.100.1.2:8080"), of_far("10.100.2.2:8080")], "not the last ones");
    assert!(index.leave_out(BTreeSet::new()));
    assert_eq!(index.update(&input()).ports.len(), 2);
    assert!(index.left_out_endpoints().is_empty());
    assert_eq!(*index.desired(), whole);
}

/// Nodes that are about to go still run, so their flows stay; and a leaving node is better than a
/// dead one.
#[test]
fn nodes_that_are_about_to_go_take_no_new_flows_while_there_are_others() {
    let udp = Protocol::Udp;
    let mut index = index(&[(udp, &["near", "far"]), (udp, &["far"]), (udp, &["far", "dead"])]);
    let name = ServiceName { namespace: "n".to_owned(), name: "lease".to_owned() };
    let lease = LeavingNode { name: name.clone(), node: "far".to_owned() };
    assert!(index.apply(lease.clone()));
    index.leave_out(set(&["dead"]));
    assert_eq!(index.update(&input()).ports.len(), 2, "the only endpoint of the second stays");
    assert_eq!(lists(&index, 0), [vec![1], vec![1, 2]]);
    assert_eq!(lists(&index, 1), [vec![1], vec![1]]);
    assert_eq!(lists(&index, 2), [vec![1], vec![1]]);
    assert!(index.delete::<LeavingNode>(&name));
    assert_eq!(index.update(&input()).ports.len(), 1);
    assert_eq!(lists(&index, 0)[0], [1, 2]);
}

/// The nodes that are left out stay so through whatever else happens.
#[test]
fn a_change_of_slices_or_of_the_node_keeps_them_out() {
    let mut index = index(&[(Protocol::Udp, &["here", "far"])]);
    index.leave_out(set(&["far", "here"]));
    let _ = index.update(&input());
    assert_eq!(lists(&index, 0)[0], [1], "never this node itself");
    index.apply(slice(1, Protocol::Udp, &["here", "far", "near"]));
    let _ = index.update(&input());
    assert_eq!(lists(&index, 0)[0], [1, 3]);
    let addresses = NodeInput { node_port_addresses: vec![Ipv4Addr::new(192, 0, 2, 1).into()], ..input() };
    let _ = index.update(&addresses);
    assert_eq!(lists(&index, 0)[0], [1, 3]);
    index.apply(slice(1, Protocol::Udp, &["far"]));
    let _ = index.update(&addresses);
    assert_eq!(lists(&index, 0)[0], [1], "nothing else is left");
}

/// An endpoint without a node is left out by its address, and only such a one.
#[test]
fn endpoints_without_a_node_are_left_out_by_their_addresses() {
    let mut index = index(&[(Protocol::Tcp, &["here", "far"]), (Protocol::Udp, &["far"])]);
    let mut nameless = slice(1, Protocol::Tcp, &["", "", "far"]);
    for endpoint in &mut nameless.endpoints[..2] {
        endpoint.node_name = None;
    }
    let addresses: Vec<_> = nameless.endpoints.iter().map(|endpoint| endpoint.address).collect();
    index.apply(nameless);
    let _ = index.update(&input());
    assert_eq!(lists(&index, 0)[0], [1, 2, 3]);
    assert_eq!(index.endpoints_without_node(10), addresses[..2].iter().copied().collect());
    assert_eq!(index.endpoints_without_node(1).len(), 1);
    let silent = Silent { addresses: addresses[1..].iter().copied().collect(), ..Silent::default() };
    assert_eq!(index.endpoints_at(&silent.addresses, 3).len(), 1, "the other has a node");
    assert!(index.leave_out(silent.clone()));
    assert!(!index.leave_out(silent), "already");
    assert_eq!(index.update(&input()).ports.len(), 1);
    assert_eq!(lists(&index, 0), [vec![1, 3], vec![1, 2, 3]]);
    let all = addresses.iter().copied().collect();
    assert!(index.leave_out(Silent { nodes: set(&["far"]), addresses: all }));
    let _ = index.update(&input());
    assert_eq!(lists(&index, 0)[0], [1, 2, 3], "the last ones");
}

/// The room of a Service must not be given to another one while a node is silent.
#[test]
fn a_service_keeps_its_room_while_its_endpoints_are_left_out() {
    let mut index = index(&[(Protocol::Udp, &["here", "far", "far"]), (Protocol::Udp, &["here"])]);
    let demand = |index: &Index| index.wanted.values().map(|wanted| wanted.demand).collect::<Vec<_>>();
    let before = demand(&index);
    index.leave_out(set(&["far"]));
    let _ = index.update(&input());
    assert_eq!(lists(&index, 0)[0], [1]);
    assert_eq!(demand(&index), before);
}

#[test]
fn nodes_and_a_few_of_their_endpoints() {
    let mut unready = slice(3, Protocol::Tcp, &["gone"]);
    unready.endpoints[0].ready = false;
    let mut index =
        index(&[(Protocol::Tcp, &["far", "far", "far", "here"]), (Protocol::Udp, &["far", "near"])]);
    index.apply(unready);
    assert_eq!(index.nodes_of_endpoints(), ["far", "here", "near"].into());
    let found = index.endpoints_of("far", 2);
    let expected = [
        ("10.100.1.1:8080", Protocol::Tcp),
        ("10.100.1.2:8080", Protocol::Tcp),
        ("10.100.2.1:8080", Protocol::Udp),
    ];
    assert_eq!(found, expected.map(|(address, protocol)| (address.parse().unwrap(), protocol)));
    assert_eq!(index.endpoints_of("gone", 3), []);
    let each = [("far", [10, 100, 1, 1]), ("here", [10, 100, 1, 4]), ("near", [10, 100, 2, 2])];
    let each = each.map(|(node, address)| (node.to_owned(), address.into()));
    assert_eq!(index.endpoint_of_each_node(), each);
}

/// The cost that the module states: a walk over the endpoints, and no update of other Services.
#[test]
fn ten_thousand_services_are_walked_over_in_much_less_than_their_update() {
    let protocol = Protocol::Tcp;
    let mut index = Index::default();
    for number in 0..10_000u16 {
        let rare = if number == 77 { "rare" } else { "far" };
        index.apply(service(number, protocol));
        index.apply(slice(number, protocol, &["a", "b", "c", "d", "e", "f", "g", "h", "i", rare]));
    }
    let started = Instant::now();
    let _ = index.update(&input());
    let all = started.elapsed();
    // The shortest of five: a busy machine interrupts some.
    let mut walks = Duration::MAX;
    for _ in 0..5 {
        index.leave_out(set(&[]));
        let started = Instant::now();
        assert!(index.leave_out(set(&["rare"])));
        assert_eq!(index.nodes_of_endpoints().len(), 11);
        assert_eq!(index.endpoints_of("rare", 3).len(), 1);
        walks = walks.min(started.elapsed());
    }
    assert_eq!(index.update(&input()).ports.len(), 1);
    println!("{walks:?} for three walks over 100,000 endpoints, {all:?} for an update of all");
    assert!(walks * 3 < all, "walks took {walks:?}, all Services {all:?}");
}
