//! `--node-port-addresses`: the addresses of the node on which a node port is served, loopback
//! included.

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
};

use serde_json::Value;
use traffic_policy_testing::{
    lab::Family,
    object::{Policy, Port, lease},
};

use super::{
    explain::{Fate, Flow, differences},
    reference::Endpoint,
    topology::{self, Folder, PORT, TARGET, endpoint_address, ip},
};

/// Values of the flag, and whether node ports are then served on each address: the primary, the
/// other address and loopback, of IPv4 and of IPv6.
const CHOICES: [(Option<&str>, [bool; 6]); 11] = [
    // The default is `primary`.
    (None, [true, false, true, true, false, true]),
    (Some("primary"), [true, false, true, true, false, true]),
    (Some("all"), [true; 6]),
    (Some("localhost"), [false, false, true, false, false, true]),
    (Some("192.168.1.0/24"), [false, true, false, true, true, true]),
    (Some("192.168.001.000/024,2001:db8:1::/64"), [false, true, false, false, true, false]),
    (Some("2001:db8::2/128"), [true, true, true, true, false, false]),
    (Some("127.0.0.0/8,::1/128"), [false, false, true, false, false, true]),
    (Some("0.0.0.0/0,192.168.1.0/24,2001:db8::/64"), [true, true, true, true, false, false]),
    (Some("192.168.1.0/24,primary"), [true, true, true, true, false, true]),
    (Some("172.16.0.0/12,2001:db8:ffff::/48"), [false; 6]),
];

const NOWHERE: u16 = 2;

fn endpoints(family: Family) -> Vec<Endpoint> {
    let near = Endpoint {
        address: endpoint_address(family, 1, 1),
        node: Some("node-near"),
        ready: true,
        serving: true,
        terminating: false,
        for_zone: None,
        for_node: None,
    };
    vec![near]
}

/// Both Services have policy Local, which never applies to the node itself. One has an endpoint
/// elsewhere, one none.
fn objects() -> Vec<Value> {
    [1, NOWHERE]
        .into_iter()
        .flat_map(|number| {
            let port = Port::tcp(PORT, TARGET).named("web").node_port(topology::node_port(number));
            let service = topology::service(number).policy(Policy::Local).port(port);
            let slices = Family::BOTH.map(|family| {
                let endpoints = if number == NOWHERE { Vec::new() } else { endpoints(family) };
                topology::slice(&service, family, "TCP", &endpoints)
            });
            [service.object()].into_iter().chain(slices)
        })
        .collect()
}

fn flows(served: [bool; 6]) -> Vec<(Flow, Fate)> {
    let mut flows = Vec::new();
    for family in Family::BOTH {
        let v4 = family == Family::V4;
        let loopbacks: &[&str] = if v4 { &["127.0.0.1", "127.9.8.7"] } else { &["::1"] };
        let mut addresses = vec![
            (topology::primary(family), served[if v4 { 0 } else { 3 }]),
            (topology::secondary(family), served[if v4 { 1 } else { 4 }]),
        ];
        addresses.extend(loopbacks.iter().map(|text| (ip(text), served[if v4 { 2 } else { 5 }])));
        for (address, served) in addresses {
            // No packet with a loopback address comes from outside, and a pod's loopback is its
            // own.
            let inside = address.is_loopback();
            let node = if inside { address } else { topology::primary(family) };
            for (number, used) in [(1, true), (NOWHERE, false)] {
                let dst = SocketAddr::new(address, topology::node_port(number));
                let name = |source: &str| format!("{source} to {address}, endpoints: {used}");
                let fate = |fate: Fate| if served { fate } else { Fate::Unhandled };
                let from_node = if used { all(family) } else { Fate::Reject };
                let mut flow = Flow::new(name("node"), node, dst, "TCP");
                flow.from = Some("node");
                flows.push((flow, fate(from_node)));
                // The port number is in use with TCP.
                flows.push((Flow::new(name("node by UDP"), node, dst, "UDP"), Fate::Unhandled));
                if inside {
                    let mut flow = Flow::new(name("pod"), address, dst, "TCP");
                    flow.from = Some("pod");
                    flows.push((flow, Fate::Unhandled));
                } else {
                    let (_, client, _) = topology::sources(family)[4];
                    let from_client = if used { Fate::Drop } else { Fate::Reject };
                    flows.push((Flow::new(name("external client"), client, dst, "TCP"), fate(from_client)));
                }
            }
        }
    }
    flows
}

/// The address from which the node reaches an endpoint does not matter here.
fn all(family: Family) -> Fate {
    Fate::Endpoints(BTreeMap::from_iter(endpoints(family).iter().map(|endpoint| (endpoint.address, None))))
}

#[test]
fn node_port_addresses() {
    are_served(&Folder::new(&objects()), &CHOICES);
}

/// A node that forwards directly has this one know all node ports, also where it serves none.
#[test]
fn node_port_addresses_beside_a_node_that_forwards_directly() {
    let addresses =
        Family::BOTH.map(|family| ip(if family == Family::V4 { "192.0.2.77" } else { "2001:db8::77" }));
    let lease = lease::opens_from("node-far", &addresses);
    let folder = Folder::new(&objects().into_iter().chain([lease]).collect::<Vec<_>>());
    let without_loopback = CHOICES.into_iter().filter(|(_, served)| !served[2] || !served[5]);
    are_served(&folder, &without_loopback.collect::<Vec<_>>());
}

fn are_served(folder: &Folder, choices: &[(Option<&str>, [bool; 6])]) {
    let mut wrong = Vec::new();
    for (chosen, served) in choices {
        let options = chosen.map(|chosen| ["--node-port-addresses", chosen]);
        let options = topology::options(options.as_ref().map_or(&[], |options| &options[..]));
        let flows = flows(*served);
        assert_eq!(flows.len(), 42);
        let differences = differences(folder.path(), &options, &flows);
        wrong.extend(differences.into_iter().map(|difference| format!("{chosen:?}: {difference}")));
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The addresses of the Node object are used without `--local-address`.
#[test]
fn addresses_of_the_node_object() {
    let folder = Folder::new(&objects());
    let dst = |address: IpAddr| SocketAddr::new(address, topology::node_port(1));
    let flows = Family::BOTH.map(|family| {
        let node = topology::primary(family);
        (Flow::new("node to itself", node, dst(node), "TCP"), all(family))
    });
    let wrong = differences(folder.path(), &[], &flows);
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
