//! Every pair of policies, with endpoints on this node, on others, terminating, unready, hinted or
//! missing, from every origin to every kind of address, in both families.

use std::net::SocketAddr;

use serde_json::{Value, json};
use traffic_policy_testing::{
    lab::Family,
    object::{self, Port},
};

use super::{
    deviations::{Policy, To},
    explain::{Fate, Flow, NODE, differences},
    reference::{Endpoint, Policies, decide},
    topology::{self, Folder, PORT, TARGET, endpoint_address},
};

const POLICIES: [Policy; 2] = [Policy::Cluster, Policy::Local];
const DESTINATIONS: [To; 4] = [To::ClusterIp, To::NodePort, To::LoadBalancer, To::ExternalIp];

const HERE: u8 = 0;
const NEAR: u8 = 1;
const FAR: u8 = 2;

fn on(node: u8, number: u8) -> Endpoint {
    Endpoint {
        // The family is set where the arrangement is used.
        address: endpoint_address(Family::V4, node, number),
        node: Some(match node {
            HERE => NODE,
            NEAR => "node-near",
            _ => "node-far",
        }),
        ready: true,
        serving: true,
        terminating: false,
        for_zone: None,
        for_node: None,
    }
}

fn terminating(endpoint: Endpoint) -> Endpoint {
    Endpoint { ready: false, serving: true, terminating: true, ..endpoint }
}

fn failing(endpoint: Endpoint) -> Endpoint {
    Endpoint { serving: false, ..terminating(endpoint) }
}

fn unready(endpoint: Endpoint) -> Endpoint {
    Endpoint { ready: false, ..endpoint }
}

/// An endpoint of a Service with publishNotReadyAddresses: marked ready, whatever its state.
fn published(endpoint: Endpoint) -> Endpoint {
    Endpoint { ready: true, serving: false, terminating: true, ..endpoint }
}

fn without_node(endpoint: Endpoint) -> Endpoint {
    Endpoint { node: None, ..endpoint }
}

fn zone(name: &'static str, endpoint: Endpoint) -> Endpoint {
    Endpoint { for_zone: Some(name), ..endpoint }
}

fn node(name: &'static str, endpoint: Endpoint) -> Endpoint {
    Endpoint { for_node: Some(name), ..endpoint }
}

/// Arrangements of endpoints: a description, and the endpoints.
fn arrangements() -> Vec<(&'static str, Vec<Endpoint>)> {
    vec![
        ("none here", vec![on(NEAR, 1), on(FAR, 1)]),
        ("some here", vec![on(HERE, 1), on(HERE, 2), on(NEAR, 1)]),
        ("all here", vec![on(HERE, 1), on(HERE, 2)]),
        ("terminating here", vec![terminating(on(HERE, 1)), on(NEAR, 1)]),
        ("terminating here beside ready", vec![terminating(on(HERE, 1)), on(HERE, 2), on(NEAR, 1)]),
        ("terminating elsewhere", vec![on(HERE, 1), terminating(on(NEAR, 1))]),
        ("all terminating", vec![terminating(on(HERE, 1)), terminating(on(NEAR, 1)), failing(on(FAR, 1))]),
        ("all terminating, elsewhere", vec![terminating(on(NEAR, 1)), unready(on(HERE, 1))]),
        ("failing here", vec![failing(on(HERE, 1)), on(NEAR, 1)]),
        ("all failing", vec![failing(on(HERE, 1)), failing(on(NEAR, 1))]),
        ("all unready", vec![unready(on(HERE, 1)), unready(on(NEAR, 1))]),
        ("unready here", vec![unready(on(HERE, 1)), on(NEAR, 1)]),
        ("no endpoint", vec![]),
        ("published", vec![published(on(HERE, 1)), on(NEAR, 1)]),
        ("of no node", vec![without_node(on(NEAR, 1)), without_node(on(FAR, 1))]),
        (
            "hints for zones",
            vec![zone("zone-a", on(HERE, 1)), zone("zone-a", on(NEAR, 1)), zone("zone-b", on(FAR, 1))],
        ),
        ("one without a hint", vec![zone("zone-a", on(HERE, 1)), on(NEAR, 1), zone("zone-b", on(FAR, 1))]),
        ("hints for other zones", vec![zone("zone-b", on(HERE, 1)), zone("zone-c", on(NEAR, 1))]),
        (
            "hints for zones, not the endpoint's own",
            vec![zone("zone-b", on(HERE, 1)), zone("zone-a", on(FAR, 1))],
        ),
        (
            "hints of unready endpoints",
            vec![zone("zone-a", on(HERE, 1)), zone("zone-b", on(FAR, 1)), unready(on(NEAR, 1))],
        ),
        (
            "hints of terminating endpoints",
            vec![zone("zone-b", terminating(on(FAR, 1))), zone("zone-a", terminating(on(HERE, 1)))],
        ),
        (
            "hints for nodes",
            vec![
                node(NODE, zone("zone-a", on(HERE, 1))),
                node("node-near", zone("zone-a", on(NEAR, 1))),
                node("node-far", zone("zone-b", on(FAR, 1))),
            ],
        ),
        (
            "hints for other nodes",
            vec![
                node("node-near", zone("zone-a", on(NEAR, 1))),
                node("node-far", zone("zone-b", on(FAR, 1))),
            ],
        ),
        ("one without a hint for a node", vec![node(NODE, on(HERE, 1)), zone("zone-a", on(NEAR, 1))]),
    ]
}

fn of_family(endpoints: &[Endpoint], family: Family) -> Vec<Endpoint> {
    let moved = |endpoint: &Endpoint| {
        let std::net::IpAddr::V4(ip) = endpoint.address.ip() else { unreachable!("written in IPv4") };
        let [.., node, number] = ip.octets();
        Endpoint { address: endpoint_address(family, node, number), ..*endpoint }
    };
    endpoints.iter().map(moved).collect()
}

/// One Service with its flows.
struct Case<'a> {
    number: u16,
    what: &'a str,
    policies: Policies,
    endpoints: &'a [Endpoint],
    /// The families that have endpoints; the Service has both.
    families: &'a [Family],
}

impl Case<'_> {
    /// The protocol. Affinity does not matter for single requests; every other Service has
    /// affinity. TCP and UDP are alike.
    fn protocol(&self) -> &'static str {
        if self.number.is_multiple_of(3) { "UDP" } else { "TCP" }
    }

    fn endpoints(&self, family: Family) -> Vec<Endpoint> {
        if self.families.contains(&family) { of_family(self.endpoints, family) } else { Vec::new() }
    }

    fn objects(&self) -> Vec<Value> {
        let port = if self.protocol() == "UDP" { Port::udp(PORT, TARGET) } else { Port::tcp(PORT, TARGET) };
        let policy = |policy| match policy {
            Policy::Cluster => object::Policy::Cluster,
            Policy::Local => object::Policy::Local,
        };
        let mut service = topology::service(self.number)
            .policy(policy(self.policies.external))
            .internal_policy(policy(self.policies.internal))
            .port(port.named("web").node_port(topology::node_port(self.number)));
        if self.number.is_multiple_of(2) {
            service = service.spec("sessionAffinity", json!("ClientIP"));
        }
        let slices = Family::BOTH
            .map(|family| topology::slice(&service, family, self.protocol(), &self.endpoints(family)));
        [service.object()].into_iter().chain(slices).collect()
    }

    fn flows(&self) -> Vec<(Flow, Fate)> {
        let mut flows = Vec::new();
        for family in Family::BOTH {
            let endpoints = self.endpoints(family);
            for (source, src, origin) in topology::sources(family) {
                for to in DESTINATIONS {
                    let dst: SocketAddr = topology::address(self.number, family, to);
                    let Policies { external, internal } = self.policies;
                    let name =
                        format!("{}, eTP {external:?}, iTP {internal:?}: {source} to {to:?}", self.what);
                    let fate = decide(self.policies, &endpoints, src, origin, to, true);
                    flows.push((Flow::new(name, src, dst, self.protocol()), fate));
                }
            }
        }
        flows
    }
}

#[test]
fn policies_endpoints_sources_and_destinations() {
    let arrangements = arrangements();
    let both = arrangements.iter().map(|(what, endpoints)| (*what, endpoints, &Family::BOTH[..]));
    let dual = [("endpoints in IPv4 only", Family::V4), ("endpoints in IPv6 only", Family::V6)];
    let one = dual.iter().map(|(what, family)| (*what, &arrangements[1].1, std::slice::from_ref(family)));
    let (mut objects, mut flows) = (Vec::new(), Vec::new());
    let mut number = 0;
    for (what, endpoints, families) in both.chain(one) {
        for external in POLICIES {
            for internal in POLICIES {
                number += 1;
                let policies = Policies { external, internal };
                let case = Case { number, what, policies, endpoints, families };
                objects.extend(case.objects());
                flows.extend(case.flows());
            }
        }
    }
    let fates = |wanted: fn(&Fate) -> bool| flows.iter().filter(|(_, fate)| wanted(fate)).count();
    let counts = [
        fates(|fate| matches!(fate, Fate::Endpoints(_))),
        fates(|fate| *fate == Fate::Reject),
        fates(|fate| *fate == Fate::Drop),
    ];
    println!("endpoints, reject, drop: {counts:?}");
    assert!(counts.iter().all(|count| *count > 200), "too few of a kind to mean something: {counts:?}");

    let folder = Folder::new(&objects);
    let wrong = differences(folder.path(), &topology::options(&[]), &flows);
    assert!(wrong.is_empty(), "{} of {} flows:\n{}", wrong.len(), flows.len(), wrong.join("\n"));
}
