//! Changes of what another node opens, or of what gets there, while its endpoints stay.

use std::sync::Arc;

use super::direct_targets::{apply, direct, lease};
use super::*;
use crate::model::{
    Dispatch, DispatchChoice, Forwarding, FrontendKind, Passing, Way, Ways, object::DirectNode,
};

/// A node as its Lease says it, and the way to it.
type State = (DirectNode, Way);

/// Returns what the packets of the only Service travel in, after a node was first in one state and
/// then in another; the Service's ports have to be among the changes.
fn changed(input: &NodeInput, forwarding: Forwarding, [first, second]: [State; 2]) -> Option<Dispatch> {
    let mut index = Index::default();
    apply(&mut index, Service { forwarding: Some(forwarding), ..direct(1, true) }, &[("a", 1)]);
    let mut input = input.clone();
    let mut changes = Changes::default();
    for (node, way) in [first, second] {
        let mut ways = Ways::default();
        ways.set(&node.node, false, way);
        input.ways = Arc::new(ways);
        index.apply(node);
        changes = index.update(&input);
    }
    let ports = &index.desired().ports;
    assert!(!ports.is_empty() && ports.keys().eq(&changes.ports), "{changes:?}");
    ports.values().next().unwrap().cluster[0].opens
}

/// Another node forwards its node ports directly to this one, which has none at that address.
#[test]
fn node_ports_of_other_nodes_are_known_once_there_are_such_nodes() {
    let mut index = Index::default();
    apply(&mut index, direct(1, true), &[("here", 1)]);
    let kinds = |index: &mut Index, loopback| {
        let _ = index.update(&NodeInput { loopback_ipv4: loopback, ..input(0) });
        let port = index.desired().ports.values().next().unwrap();
        let of_node_port = port.frontends.iter().filter(|frontend| frontend.address.port() == 30_001);
        of_node_port.map(|frontend| (frontend.kind, frontend.address.to_string())).collect::<Vec<_>>()
    };
    let any = |kind| vec![(kind, "0.0.0.0:30001".to_owned())];
    assert_eq!(kinds(&mut index, false), []);
    assert_eq!(kinds(&mut index, true), any(FrontendKind::LoopbackNodePort));
    index.apply(lease("there", "192.0.2.1", false));
    assert_eq!(kinds(&mut index, true), any(FrontendKind::LoopbackNodePort));
    assert_eq!(kinds(&mut index, false), any(FrontendKind::OpenedNodePort));
}

#[test]
fn services_with_endpoints_there_change() {
    let input = input(1);
    let [ipip, udp] = [Dispatch::Ipip, Dispatch::Udp];
    let by = |dispatches: &[Dispatch]| DirectNode {
        dispatches: dispatches.to_vec(),
        ..lease("a", "192.0.2.1", true)
    };
    let open = |dispatches: &[Dispatch]| (by(dispatches), Way::OPEN);
    for (first, second, used) in [(ipip, udp, udp), (udp, ipip, ipip)] {
        let states = [open(&[first]), open(&[second])];
        assert_eq!(changed(&input, Forwarding::Direct, states), Some(used), "the Lease");
    }
    let within_udp = Passing { within_udp: true, ..Passing::NONE };
    let states = [Way::OPEN, Way { direct: within_udp, tunnel: within_udp, by_mac: false }]
        .map(|way| (by(&[ipip, udp]), way));
    assert_eq!(changed(&input, Forwarding::Direct, states), Some(udp), "what gets there");
    let states = [true, false].map(|tunnels| (DirectNode { tunnels, ..by(&[ipip]) }, Way::OPEN));
    assert_eq!(changed(&input, Forwarding::Tunnel, states), None, "it answers the client itself");

    let l2 = Dispatch::L2 { else_udp: false };
    let input = NodeInput { dispatch: DispatchChoice::Only(l2), choice: "maglev".to_owned(), ..input };
    let states = ["maglev", "random"]
        .map(|choice| (DirectNode { choice: Some(choice.to_owned()), ..by(&Dispatch::ALL) }, Way::OPEN));
    assert_eq!(changed(&input, Forwarding::Direct, states), Some(ipip), "it chooses otherwise");
}
