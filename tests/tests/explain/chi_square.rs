//! A chi-square test of the choice among endpoints: each gets its share.
//!
//! Without a node the seed of the flow hash is fixed, and so are the flows: all runs are equal.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use fastrand::Rng;
use serde_json::json;
use traffic_policy_testing::explain::{self, Flow};
use traffic_policy_testing::lab::{Addresses, Family};
use traffic_policy_testing::object::{Backend, Manifests, Policy, Port, Service};

use crate::wire::SEED;

const NODE: Addresses = Addresses::new([172, 18, 0, 11], [0xfd00, 0x172, 0x18, 0, 0, 0, 0, 0x11]);
const PORT: u16 = 30_080;
const FLOWS: u32 = 10_000;
const ENDPOINTS: u8 = 7;
/// The critical value, exceeded by chance once in 1,000 times with 6 degrees of freedom.
const CRITICAL: f64 = 22.458;

fn manifests() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let manifests = Manifests::at(folder.path()).unwrap();
    let addresses = Family::BOTH.map(|family| json!({"type": "InternalIP", "address": NODE.of(family)}));
    let node = json!({
        "apiVersion": "v1", "kind": "Node", "metadata": {"name": "node-1"}, "status": {"addresses": addresses},
    });
    manifests.write("node", &[node]).unwrap();
    let service = Service::new("web")
        .policy(Policy::Cluster)
        .port(Port::tcp(80, 8080).node_port(PORT))
        .port(Port::udp(80, 8080).node_port(PORT));
    // Some are on this node, some elsewhere: it must make no difference.
    let backends: Vec<_> = (1..=ENDPOINTS)
        .map(|number| {
            let pod = Addresses::new([10, 244, 1, number], [0xfd00, 0x10, 0x244, 1, 0, 0, 0, number.into()]);
            Backend::at(&pod).on_node(if number < 4 { "node-1" } else { "node-2" })
        })
        .collect();
    manifests.apply(&service, &backends).unwrap();
    folder
}

/// A source; `kind` is the way in which real clients differ from each other.
fn source(kind: &str, family: Family, number: u32, random: &mut Rng) -> SocketAddr {
    let ip = |number: u32| -> IpAddr {
        match family {
            Family::V4 => Ipv4Addr::from_bits(0x6440_0000 + number).into(),
            Family::V6 => {
                Ipv6Addr::from_bits(0x2001_0db8_0000_0000_0000_0000_0000_0000 + u128::from(number)).into()
            }
        }
    };
    let port = |number: u32| u16::try_from(1024 + number % 60_000).unwrap();
    match kind {
        "ports counted up" => SocketAddr::new(ip(1), port(number)),
        "ports counted up by twos" => SocketAddr::new(ip(1), port(number * 2)),
        "addresses counted up" => SocketAddr::new(ip(number), 40_000),
        _ => SocketAddr::new(ip(random.u32(..1 << 16)), port(random.u32(..60_000))),
    }
}

fn chi_square(counts: &BTreeMap<SocketAddr, u32>) -> f64 {
    let share = f64::from(FLOWS) / f64::from(ENDPOINTS);
    // An endpoint without any flow counts, too.
    let missing = f64::from(ENDPOINTS) - counts.len() as f64;
    counts.values().map(|count| (f64::from(*count) - share).powi(2) / share).sum::<f64>() + missing * share
}

/// The samples of one family, each with a description.
fn samples(wanted: Family) -> Vec<(String, Vec<Flow>)> {
    let mut random = Rng::with_seed(SEED);
    let mut samples = Vec::new();
    for family in Family::BOTH {
        for (from, protocol) in [("external", "TCP"), ("external", "UDP"), ("pod", "TCP"), ("node", "TCP")] {
            for kind in ["at random", "ports counted up", "ports counted up by twos", "addresses counted up"]
            {
                // Sockets have no tuple yet when they choose: the kernel's random numbers decide.
                if from != "external" && kind != "at random" {
                    continue;
                }
                let flows: Vec<_> = (0..FLOWS)
                    .map(|number| {
                        let source = source(kind, family, number, &mut random);
                        Flow::new(protocol, source, SocketAddr::new(NODE.of(family), PORT)).from(from)
                    })
                    .collect();
                samples.push((family, format!("{family:?} {protocol} from {from}, {kind}"), flows));
            }
        }
    }
    // Those of the other family are drawn, too: a sample is the same whichever test uses it.
    samples.retain(|(family, ..)| *family == wanted);
    samples.into_iter().map(|(_, what, flows)| (what, flows)).collect()
}

fn choice(family: Family) {
    let manifests = manifests();
    let samples = samples(family);
    // All in one call: each call loads every program.
    let flows: Vec<_> = samples.iter().flat_map(|(_, flows)| flows.iter().cloned()).collect();
    let answers = explain::offline(manifests.path(), "node-1", &flows, &[]).unwrap();
    assert_eq!(answers.len(), samples.len() * FLOWS as usize);
    for ((what, _), answers) in samples.iter().zip(answers.chunks(FLOWS as usize)) {
        let mut counts = BTreeMap::new();
        for answer in answers {
            let endpoint = answer.endpoint.unwrap_or_else(|| panic!("{what}: {answer:?}"));
            *counts.entry(endpoint).or_default() += 1;
        }
        let chi_square = chi_square(&counts);
        println!("{what}: {chi_square:.2}");
        assert!(
            counts.len() == usize::from(ENDPOINTS) && chi_square < CRITICAL,
            "{what}: {chi_square:.2} {counts:?}"
        );
    }
}

#[test]
fn ipv4() {
    choice(Family::V4);
}

#[test]
fn ipv6() {
    choice(Family::V6);
}
