//! A chi-square test of the connections that begin on this node: every endpoint gets its share.

use std::collections::BTreeMap;
use std::fs;
use std::net::SocketAddr;

use aya::maps::{HashMap, Map, MapData};
use traffic_policy_dataplane::ToWire;
use traffic_policy_ebpf::abi::{Address, SocketKey, TranslatedSocket};
use traffic_policy_testing::lab::{Addresses, Family};
use traffic_policy_testing::object::Backend;

use crate::fixture::{SocketCluster, service, service_at};
use traffic_policy_tests::caller::Kind;

const SOCKETS: u32 = 10_000;
const ENDPOINTS: u8 = 7;
/// The critical value, exceeded by chance once in 1,000,000 times with 6 degrees of freedom. The
/// kernel's random numbers have no seed.
const CRITICAL: f64 = 38.258;

fn endpoint(number: u8) -> Addresses {
    // No endpoint exists; some are on this node, some are not.
    let node = if number < 4 { 1 } else { 2 };
    Addresses::new(
        [10, 244, node, 100 + number],
        [0xfd00, 0x10, 0x244, node.into(), 0, 0, 0, (0x100 + u16::from(number))],
    )
}

/// The number of sockets of each endpoint, from the packet path's own table.
fn counts(fixture: &SocketCluster, family: Family) -> BTreeMap<u8, u32> {
    let version = fs::read_dir(fixture.cluster.agents[0].pin_dir()).unwrap().next().unwrap().unwrap().path();
    let map = MapData::from_pin(version.join("maps/tp_sockets")).unwrap();
    let sockets: HashMap<_, SocketKey, TranslatedSocket> = Map::LruHashMap(map).try_into().unwrap();
    let mut counts = BTreeMap::new();
    let known: BTreeMap<[u64; 2], u8> = (1..=ENDPOINTS)
        .map(|number| {
            let address = endpoint(number);
            let wide =
                if family == Family::V4 { address.v4.to_wire().wide() } else { address.v6.to_wire().wide() };
            (wide.wire(), number)
        })
        .collect();
    for entry in &sockets {
        let (key, socket) = entry.unwrap();
        if key.forward == 1 && (key.ipv6 == 1) == (family == Family::V6) {
            *counts.entry(known[&socket.address.wire()]).or_default() += 1;
        }
    }
    counts
}

#[test]
fn choice() {
    let fixture = SocketCluster::start(&[1, 1], |cluster| {
        let backends: Vec<_> = (1..=ENDPOINTS).map(|number| Backend::at(&endpoint(number))).collect();
        cluster.manifests.apply(&service(10), &backends).unwrap();
    });
    let caller = fixture.in_pod(1, 1);
    for kind in [Kind::V4, Kind::V6] {
        let to: SocketAddr = service_at(10, kind);
        caller.udp(kind).scatter(SOCKETS, to);
        let counts = counts(&fixture, kind.family());
        let total: u32 = counts.values().sum();
        assert_eq!(total, SOCKETS, "{kind:?}: {counts:?}");
        let share = f64::from(SOCKETS) / f64::from(ENDPOINTS);
        let chi_square: f64 = counts.values().map(|count| (f64::from(*count) - share).powi(2) / share).sum();
        println!("{kind:?}: {chi_square:.2} {counts:?}");
        assert!(
            counts.len() == usize::from(ENDPOINTS) && chi_square < CRITICAL,
            "{kind:?}: {chi_square:.2} {counts:?}"
        );
    }
}
