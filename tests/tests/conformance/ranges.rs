//! `loadBalancerSourceRanges`: the sources that may use a load balancer's address, and proof that
//! nothing else depends on them.

use std::net::IpAddr;

use serde_json::{Value, json};
use traffic_policy_testing::{
    lab::Family,
    object::{self, Port},
};

use super::{
    deviations::{Origin, Policy, To},
    explain::{Flow, differences},
    reference::{Endpoint, Policies, decide},
    topology::{self, Folder, PORT, TARGET, endpoint_address, ip},
};

/// Ranges, and the sources that they admit: the list is written by hand, by what `explain` must
/// answer.
struct Case {
    what: &'static str,
    ranges: &'static [&'static str],
    allowed: &'static [&'static str],
}

/// Some have blanks and leading zeros, as users write them.
const CASES: [Case; 6] = [
    Case {
        what: "clients",
        ranges: &["203.0.113.000/025 ", "2001:db8:cafe::/64"],
        allowed: &["client", "client6"],
    },
    Case {
        what: "clients and the node",
        ranges: &[" 203.0.113.0/25", "192.168.0.0/24", "2001:db8:cafe::/64", "2001:db8::/64"],
        // Ranges that admit the node admit its load balancer addresses, too.
        allowed: &["client", "client6", "node", "node6", "vip", "vip6"],
    },
    Case { what: "the node's other address", ranges: &["192.168.1.0/24"], allowed: &["other", "*6"] },
    Case { what: "pods", ranges: &["10.180.0.0/24", "fd00:10::/64"], allowed: &["pod", "pod6"] },
    // A family without any range is not restricted.
    Case { what: "IPv6 only", ranges: &["2001:db8:cafe::/64"], allowed: &["client6", "*"] },
    Case { what: "everybody", ranges: &["0.0.0.0/0", "::/0"], allowed: &["*", "*6"] },
];

fn sources(number: u16) -> Vec<(&'static str, IpAddr, Origin)> {
    let vip = |family| topology::address(number, family, To::LoadBalancer).ip();
    vec![
        ("client", ip("203.0.113.2"), Origin::External),
        ("other client", ip("203.0.113.130"), Origin::External),
        ("pod", ip("10.180.0.9"), Origin::Pod),
        ("node", topology::primary(Family::V4), Origin::Node),
        ("other", topology::secondary(Family::V4), Origin::Node),
        ("vip", vip(Family::V4), Origin::External),
        ("client6", ip("2001:db8:cafe::2"), Origin::External),
        ("other client6", ip("2001:db8:beef::2"), Origin::External),
        ("pod6", ip("fd00:10::9"), Origin::Pod),
        ("node6", topology::primary(Family::V6), Origin::Node),
        ("vip6", vip(Family::V6), Origin::External),
    ]
}

impl Case {
    fn allows(&self, source: &str) -> bool {
        let everybody = if source.ends_with('6') { "*6" } else { "*" };
        self.allowed.contains(&source) || self.allowed.contains(&everybody)
    }
}

#[test]
fn source_ranges() {
    let ready = |family, node, name| Endpoint {
        address: endpoint_address(family, node, 1),
        node: Some(name),
        ready: true,
        serving: true,
        terminating: false,
        for_zone: None,
        for_node: None,
    };
    let (mut objects, mut flows) = (Vec::<Value>::new(), Vec::new());
    let mut number = 0;
    for case in &CASES {
        // With endpoints, and without any: sources that the ranges exclude then still get no answer
        // at all.
        for (endpoints_too, external) in
            [(true, Policy::Cluster), (true, Policy::Local), (false, Policy::Cluster), (false, Policy::Local)]
        {
            number += 1;
            let policy =
                if external == Policy::Local { object::Policy::Local } else { object::Policy::Cluster };
            let service = topology::service(number)
                .policy(policy)
                .port(Port::tcp(PORT, TARGET).named("web").node_port(topology::node_port(number)))
                .spec("loadBalancerSourceRanges", json!(case.ranges));
            let endpoints = |family| match endpoints_too {
                true => vec![ready(family, 1, "node-near"), ready(family, 2, "node-far")],
                false => Vec::new(),
            };
            objects.push(service.object());
            objects.extend(
                Family::BOTH.map(|family| topology::slice(&service, family, "TCP", &endpoints(family))),
            );
            for (source, src, origin) in sources(number) {
                let family = if src.is_ipv4() { Family::V4 } else { Family::V6 };
                for to in [To::LoadBalancer, To::ClusterIp, To::NodePort, To::ExternalIp] {
                    let policies = Policies { external, internal: Policy::Cluster };
                    let allowed = case.allows(source);
                    let fate = decide(policies, &endpoints(family), src, origin, to, allowed);
                    let state = if endpoints_too { "" } else { ", no endpoint" };
                    let name = format!("{} let in, eTP {external:?}{state}: {source} to {to:?}", case.what);
                    flows.push((Flow::new(name, src, topology::address(number, family, to), "TCP"), fate));
                }
            }
        }
    }
    assert!(flows.len() > 1_000);
    let folder = Folder::new(&objects);
    let wrong = differences(folder.path(), &topology::options(&[]), &flows);
    assert!(wrong.is_empty(), "{} of {} flows:\n{}", wrong.len(), flows.len(), wrong.join("\n"));
}
