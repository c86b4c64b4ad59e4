//! Packets by which other nodes can be asked what gets there.

use std::{
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use super::*;
use crate::model::{Algorithm, Dispatch, Forwarding, object::DirectNode};

pub(super) fn lease(node: &str, address: &str, opens: bool) -> DirectNode {
    DirectNode {
        name: name("n", node),
        node: node.to_owned(),
        opens,
        dispatches: vec![Dispatch::Ipip],
        sctp: false,
        tunnels: true,
        tunnels_sctp: false,
        addresses: vec![address.parse().unwrap()],
        macs: Vec::new(),
        choice: None,
        says_more: false,
        owner: None,
    }
}

/// A Service with an endpoint on each of these nodes, by the last byte of its address.
pub(super) fn apply(index: &mut Index, service: Service, endpoints: &[(&str, u8)]) {
    let number = service.cluster_ips[0].to_string().rsplit('.').next().unwrap().parse().unwrap();
    let mut slice = slice(number, number, endpoints.iter().map(|(_, last)| (*last, true, true)).collect());
    for (endpoint, (node, _)) in slice.endpoints.iter_mut().zip(endpoints) {
        endpoint.node_name = Some((*node).into());
    }
    slice.ports[0].protocol = service.ports[0].protocol;
    index.apply(service);
    index.apply(slice);
}

pub(super) fn direct(number: u8, vip: bool) -> Service {
    let mut service = service(number, None, 30_000 + u16::from(number), number, Policy::Cluster);
    service.forwarding = Some(Forwarding::Direct);
    if !vip {
        service.load_balancer_ips.clear();
    }
    service
}

#[test]
fn one_for_each_node_from_outside_if_there_is_any() {
    let mut index = Index::default();
    for (node, address, opens) in [
        ("here", "192.0.2.100", true),
        ("a", "192.0.2.1", true),
        ("b", "192.0.2.2", true),
        ("c", "192.0.2.3", false),
    ] {
        index.apply(lease(node, address, opens));
    }
    let targets = |index: &mut Index| {
        let _ = index.update(&input(1));
        let targets = index.direct_targets();
        let of = targets.of.into_iter().map(|((node, ipv6), target)| {
            assert!(!ipv6);
            (node, target.endpoint.to_string(), target.frontend.to_string())
        });
        (of.collect::<Vec<_>>(), targets.is_used)
    };
    assert_eq!(targets(&mut index), (Vec::new(), [false; 2]), "no Service");

    // Not one that is not forwarded directly, nor one of UDP, which shows that packets may be.
    apply(&mut index, Service { forwarding: None, ..direct(1, true) }, &[("a", 1)]);
    assert_eq!(targets(&mut index), (Vec::new(), [false; 2]));
    let mut udp = direct(2, true);
    udp.ports[0].protocol = Protocol::Udp;
    apply(&mut index, udp, &[("a", 2)]);
    assert_eq!(targets(&mut index), (Vec::new(), [true, false]));

    // Neither this node, nor one that opens nothing.
    apply(&mut index, direct(3, false), &[("here", 3), ("a", 4), ("b", 5), ("c", 6)]);
    let of = |node: &str, last: u8, frontend: &str| {
        let frontend: SocketAddr = frontend.parse().unwrap();
        (node.to_owned(), IpAddr::from([10, 1, 0, last]).to_string(), frontend.to_string())
    };
    let inside = [of("a", 4, "10.96.0.3:80"), of("b", 5, "10.96.0.3:80")];
    assert_eq!(targets(&mut index), (inside.to_vec(), [true, false]));

    // An address from outside comes first, node by node.
    apply(&mut index, direct(4, true), &[("b", 7)]);
    let mixed = [of("a", 4, "10.96.0.3:80"), of("b", 7, "192.0.2.4:80")];
    assert_eq!(targets(&mut index), (mixed.to_vec(), [true, false]));

    // By MAC address a node is asked by a Service whose endpoints it finds by a table.
    let by_table = |index: &mut Index, service: Service| {
        apply(index, service, &[("b", 8)]);
        let _ = index.update(&input(1));
        let targets = index.direct_targets().of;
        assert_eq!(targets[&("b".to_owned(), false)].frontend, "192.0.2.4:80".parse().unwrap());
        ["a", "b"].map(|node| targets[&(node.to_owned(), false)].by_table.map(|by| by.to_string()))
    };
    let maglev = || Service { algorithm: Some(Algorithm::Maglev), ..direct(5, false) };
    for (service, wanted) in [
        (maglev(), Some("10.96.0.5:80".to_owned())),
        (Service { affinity: Some(Duration::from_secs(1)), ..maglev() }, None),
        (Service { forwarding: Some(Forwarding::Tunnel), ..maglev() }, None),
        (Service { internal_policy: Policy::Local, ..maglev() }, None),
        (Service { algorithm: None, ..maglev() }, None),
    ] {
        assert_eq!(by_table(&mut index, service.clone()), [None, wanted], "{service:?}");
    }

    // An endpoint with the address of a node gets nothing directly.
    index.apply(lease("d", "10.1.0.4", false));
    assert_eq!(targets(&mut index), (mixed[1..].to_vec(), [true, false]));
}
