//! Maglev tables: the same endpoint on every node, whatever its seed.

use std::{collections::BTreeMap, net::SocketAddr};

use traffic_policy_dataplane::MapSizes;
use traffic_policy_testing::harness::{self, Frontend, Harness, Setup, Spot};

use crate::dialogue::{Dialogue, everywhere};
use crate::table::{ENDPOINT_PORT, PORT, Terms};

const NODE: (Spot, u16) = (Spot::Node, PORT);
/// Another address of the node, for node ports.
const OTHER: (Spot, u16) = (Spot::NodeEth1, PORT);
const ALL: [(Spot, u16); 4] = [
    (Spot::Near, ENDPOINT_PORT),
    (Spot::OtherNear, ENDPOINT_PORT),
    (Spot::Far, ENDPOINT_PORT),
    (Spot::Local, ENDPOINT_PORT),
];
/// The first port of the client, from which it opens one connection after the other.
const FIRST_PORT: u16 = 40_000;

fn of(at: (Spot, u16), endpoints: &[(Spot, u16)]) -> Frontend {
    Frontend::new(at.0, at.1).endpoints(endpoints)
}

fn by_table(at: (Spot, u16), endpoints: &[(Spot, u16)]) -> Frontend {
    of(at, endpoints).maglev("1021".parse().unwrap())
}

/// The endpoint of each of `count` connections on a node with this seed.
fn endpoints(
    harness: &mut Harness,
    terms: Terms,
    at: (Spot, u16),
    frontend: Frontend,
    (count, seed): (u16, u64),
) -> Vec<SocketAddr> {
    let setup = Setup::of(frontend).snat_ports(5000..8000).with(|setup| setup.seed = seed);
    harness.set_up(&setup);
    (FIRST_PORT..FIRST_PORT + count)
        .map(|port| endpoint(harness, Dialogue::new(terms, at).with_port(port)))
        .collect()
}

fn endpoint(harness: &Harness, dialogue: Dialogue) -> SocketAddr {
    let outcome = dialogue.open(harness).outcome;
    assert!(matches!(outcome, "forwarded" | "delivered"), "{outcome}");
    dialogue.request_entry(harness).unwrap().new_to
}

/// Another node differs in the order in which it was told of the endpoints, too.
#[test]
fn two_nodes_choose_the_same_endpoints() {
    everywhere(|harness, terms| {
        let mut reversed = ALL;
        reversed.reverse();
        let first = endpoints(harness, terms, NODE, by_table(NODE, &ALL), (1000, 1));
        let second = endpoints(harness, terms, NODE, by_table(NODE, &reversed), (1000, 2));
        assert_eq!(first, second);
        let mut shares: BTreeMap<_, usize> = BTreeMap::new();
        first.iter().for_each(|endpoint| *shares.entry(endpoint).or_default() += 1);
        // Five standard deviations of 1,000 independent choices among four.
        assert!(shares.len() == 4 && shares.values().all(|share| share.abs_diff(250) < 69), "{shares:?}");
        // Two nodes that choose at random agree for about a quarter.
        let random = endpoints(harness, terms, NODE, of(NODE, &ALL), (1000, 1));
        let other = endpoints(harness, terms, NODE, of(NODE, &ALL), (1000, 2));
        let agree = random.iter().zip(&other).filter(|(one, other)| one == other).count();
        assert!(agree < 350, "{agree} of 1000");
    });
}

#[test]
fn connections_to_other_endpoints_stay_when_one_leaves() {
    everywhere(|harness, terms| {
        let before = endpoints(harness, terms, NODE, by_table(NODE, &ALL), (400, 1));
        let after = endpoints(harness, terms, NODE, by_table(NODE, &ALL[..3]), (400, 1));
        let gone = SocketAddr::from(terms.at(ALL[3]));
        assert!(!after.contains(&gone));
        let moved = before.iter().zip(&after).filter(|(old, new)| **old != gone && old != new).count();
        assert!(moved < 20, "{moved} of 400");
    });
}

/// A node port has other addresses on other nodes; a load balancer's address is one of several of
/// the same Service, and is a part of the hash.
#[test]
fn a_node_port_is_the_same_on_every_address() {
    everywhere(|harness, terms| {
        let first = endpoints(harness, terms, NODE, by_table(NODE, &ALL).node_port(), (100, 1));
        let second = endpoints(harness, terms, OTHER, by_table(OTHER, &ALL).node_port(), (100, 2));
        assert_eq!(first, second);
        let third = endpoints(harness, terms, OTHER, by_table(OTHER, &ALL), (100, 2));
        assert_ne!(first, third);
    });
}

#[test]
fn affinity_goes_before() {
    everywhere(|harness, terms| {
        let sticky = |endpoints: &[_]| by_table(NODE, endpoints).affinity(60);
        let all = endpoints(harness, terms, NODE, sticky(&ALL), (100, 1));
        assert!(all.iter().all(|endpoint| *endpoint == all[0]));
        // Its first connection is placed by the table.
        let without = endpoints(harness, terms, NODE, by_table(NODE, &ALL), (100, 1));
        assert_eq!(all[0], without[0]);
    });
}

/// Parts of the array of tables are mapped as pages, which they do not begin or end with.
#[test]
fn tables_are_written_where_they_belong() {
    harness::with(|harness| {
        let tables = &mut harness.tables.tables;
        let words: Vec<u64> = (1..=1_100).collect();
        for first in [0, 1, 510, 511, 512, 5_000] {
            tables.write(first, &vec![0; 1_102]).unwrap();
            tables.write(first + 1, &words).unwrap();
            let around = tables.read(first, 1_102).unwrap();
            assert_eq!((around[0], &around[1..1_101], around[1_101]), (0, &words[..], 0), "{first}");
        }
        let end = MapSizes::DEFAULT.maglev;
        tables.write(end - 2, &[7, 8]).unwrap();
        assert_eq!(tables.read(end - 2, 2).unwrap(), [7, 8]);
        tables.write(end - 2, &[0, 0]).unwrap();
        assert!(tables.write(end - 1, &[7, 8]).is_err() && tables.read(end, 1).is_err());
    });
}
