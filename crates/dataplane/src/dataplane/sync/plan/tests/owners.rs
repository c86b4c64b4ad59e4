//! The former owners of each slot, also of endpoints with unequal weights, and after another agent
//! has taken over.

use std::net::SocketAddr;

use proptest::prelude::*;
use traffic_policy_cluster::model::{Dispatch, Forwarding};
use traffic_policy_ebpf::abi::maglev::{self, FORMER};

use super::*;
use crate::dataplane::sync::ranges::QUARANTINE;

/// The last byte of an endpoint's address, and its weight.
type Weighted = (u8, u16);

const BEFORE: [Weighted; 3] = [(1, 2), (2, 1), (3, 1)];
const ROOMY: Capacity = Capacity { tables: 64 * 63, slots: 1_000, ..CAPACITY };

fn direct(endpoints: &[Weighted]) -> ServicePort {
    let opening = |(name, weight): &Weighted| Endpoint {
        opens: Some(Dispatch::Ipip),
        held: None,
        weight: *weight,
        ..endpoint(&format!("10.0.0.{name}:8080"), false)
    };
    let port = port(A, Policy::Cluster, &endpoints.iter().map(opening).collect::<Vec<_>>());
    ServicePort { algorithm: Algorithm::Maglev, forwarding: Forwarding::Direct, ..port }
}

/// An agent with room for many tables, and the Service port.
fn node_of(endpoints: &[Weighted]) -> Node {
    let mut node = Node { planner: Planner::new(Held::default(), ROOMY), ..Node::new() };
    node.weigh(endpoints);
    node
}

impl Node {
    fn weigh(&mut self, endpoints: &[Weighted]) -> Plan {
        self.now += QUARANTINE;
        self.set("a", Some(direct(endpoints)))
    }

    /// The owner of each slot of a table.
    fn owners_of(&self, table: IndexRange, list: IndexRange) -> Vec<Option<SocketAddr>> {
        let list = self.planner.lists.get(false, list);
        let elements = table.base..table.base + maglev::elements(table.len);
        let elements: Vec<u64> = elements.map(|index| self.elements[&index]).collect();
        let places = maglev::unpack(&elements, table.len);
        places.map(|place| list.get(usize::from(place)).map(|endpoint| endpoint.address)).collect()
    }

    fn owners(&self) -> Vec<Option<SocketAddr>> {
        let frontend = self.frontend(A);
        self.owners_of(frontend.maglev, frontend.cluster)
    }

    /// The former owners of each slot, the last one first.
    fn former_owners(&self) -> Vec<Vec<SocketAddr>> {
        let frontend = self.frontend(A);
        let len = frontend.maglev.len;
        let nth = |nth: u32| IndexRange { base: frontend.former.base + nth * maglev::elements(len), len };
        let tables = (0..frontend.former.len).map(|number| self.owners_of(nth(number), frontend.former_list));
        let mut owners = vec![Vec::new(); len as usize];
        for table in tables {
            owners.iter_mut().zip(table).for_each(|(owners, owner)| owners.extend(owner));
        }
        owners
    }
}

/// Returns the former owners that each slot should have after these owners, the present ones last.
fn expected(history: &[Vec<Option<SocketAddr>>]) -> Vec<Vec<SocketAddr>> {
    let (present, earlier) = history.split_last().unwrap();
    let of_slot = |slot: usize| {
        let mut owners = Vec::new();
        for owner in earlier.iter().rev().filter_map(|owners| owners[slot]) {
            if Some(owner) != present[slot] && !owners.contains(&owner) {
                owners.push(owner);
            }
        }
        owners.truncate(FORMER as usize);
        owners
    };
    (0..present.len()).map(of_slot).collect()
}

/// Asserts that each slot whose owner differs from that `before` has that one as its former owner.
#[track_caller]
fn assert_kept(node: &Node, before: &[Option<SocketAddr>]) {
    assert!(node.frontend(A).former.len > 0, "no former owners");
    assert_eq!(node.former_owners(), expected(&[before.to_vec(), node.owners()]));
}

const CHANGES: [(&str, &[Weighted]); 7] = [
    ("one leaves", &[(1, 2), (2, 1)]),
    ("one comes", &[(1, 2), (2, 1), (3, 1), (4, 1)]),
    ("one replaces another, with other weights", &[(1, 1), (2, 2), (4, 2)]),
    ("the weights alone change", &[(1, 1), (2, 1), (3, 3)]),
    ("the weights become equal", &[(1, 1), (2, 1), (3, 1)]),
    ("one gets no new connections", &[(1, 0), (2, 1), (3, 1)]),
    ("all others", &[(7, 3), (8, 1)]),
];

/// Makes each change, behind what `prepare` does after the endpoints of before were written.
fn each_change_keeps_them(prepare: impl Fn(&mut Node)) {
    for (what, after) in CHANGES {
        println!("{what}");
        let mut node = node_of(&BEFORE);
        let before = node.owners();
        prepare(&mut node);
        node.weigh(after);
        assert_kept(&node, &before);
        node.weigh(&BEFORE);
        assert_eq!(node.owners(), before, "again");
    }
}

#[test]
fn with_weights_the_owners_before_a_change_are_kept() {
    each_change_keeps_them(|_| ());
}

#[test]
fn a_change_while_no_agent_runs_keeps_them() {
    each_change_keeps_them(|node| node.restart_in(ROOMY));
}

#[test]
fn a_change_after_a_take_over_keeps_them() {
    each_change_keeps_them(|node| {
        node.restart_in(ROOMY);
        assert_eq!(node.weigh(&BEFORE).ops, []);
    });
}

/// The endpoints and weights of the maps are other ones than those that are known of a Service port
/// for which there is no room.
#[test]
fn a_service_left_out_at_a_take_over_keeps_them_for_its_next_change() {
    let mut node = node_of(&[(1, 2), (2, 1)]);
    let before = node.owners();
    node.restart_in(Capacity { slots: 4, ..ROOMY });
    let plan = node.weigh(&[(1, 3), (2, 1), (3, 1)]);
    assert_eq!(plan.left_out.len(), 1);
    assert_eq!(node.owners(), before);
    node.weigh(&[(1, 1), (2, 1)]);
    assert_kept(&node, &before);
}

#[test]
fn a_table_of_another_size_has_none() {
    let mut node = node_of(&BEFORE);
    node.weigh(&[(1, 2), (2, 1)]);
    node.restart_in(ROOMY);
    node.table_size = "509".parse().unwrap();
    node.weigh(&[(1, 2)]);
    let frontend = node.frontend(A);
    assert_eq!((frontend.maglev.len, frontend.former.len, frontend.former_list.len), (509, 0, 0));
    let before = node.owners();
    node.weigh(&[(2, 1), (3, 5)]);
    assert_kept(&node, &before);
}

/// The change itself does not depend on what was before.
#[test]
fn without_the_table_of_before_only_they_are_missing() {
    let mut node = node_of(&BEFORE);
    node.elements.clear();
    let plan = node.weigh(&[(1, 2), (2, 1)]);
    assert!(plan.left_out.is_empty());
    assert_eq!((node.frontend(A).cluster.len, node.frontend(A).former.len), (2, 0));
}

fn endpoints() -> impl Strategy<Value = Vec<Weighted>> {
    let weights = proptest::collection::vec(0_u16..5, 6);
    (weights, 0_u8..64).prop_map(|(mut weights, which)| {
        let all: Vec<u8> = (0..6).filter(|name| which & 1 << name != 0).collect();
        // The model leaves no list without a weight.
        if let Some(first) = all.first() {
            weights[usize::from(*first)] += 1;
        }
        all.into_iter().map(|name| (name + 1, weights[usize::from(name)])).collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// The last owners of each slot are kept until the Service has no endpoint, by whichever agent
    /// they were written.
    #[test]
    fn the_last_owners_of_each_slot_are_kept(
        steps in proptest::collection::vec((endpoints(), any::<bool>()), 1..12),
    ) {
        let mut node = Node { planner: Planner::new(Held::default(), ROOMY), ..Node::new() };
        let mut history = Vec::new();
        for (endpoints, is_restarted) in steps {
            if is_restarted {
                node.restart_in(ROOMY);
            }
            node.weigh(&endpoints);
            if endpoints.is_empty() {
                history.clear();
                prop_assert_eq!(node.frontend(A).former.len, 0);
                continue;
            }
            history.push(node.owners());
            prop_assert_eq!(node.former_owners(), expected(&history));
        }
    }
}
