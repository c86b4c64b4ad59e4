//! Services that other nodes may not know yet.

use std::{collections::BTreeSet, sync::Arc};

use super::{
    direct_targets::{apply, direct, lease},
    *,
};
use crate::model::{Dispatch, DispatchChoice, Way, Ways, object::DirectNode};

const BY_MAC: Option<Dispatch> = Some(Dispatch::L2 { else_udp: false });
const NAMED: Option<Dispatch> = Some(Dispatch::Ipip);

/// An index with a node that has answered by MAC address, and the input by which it has.
fn answered() -> (Index, NodeInput) {
    let mut index = Index::default();
    let there = lease("there", "192.0.2.1", true);
    let dispatches = DispatchChoice::Auto.opened().to_vec();
    index.apply(DirectNode { dispatches, choice: Some(String::new()), ..there });
    let mut ways = Ways::default();
    ways.set("there", false, Way { by_mac: true, ..Way::OPEN });
    (index, NodeInput { ways: Arc::new(ways), ..input(1) })
}

/// Returns what packets to the endpoint of each Service travel in, and how many Services changed.
fn opens(index: &mut Index, input: &NodeInput) -> (Vec<Option<Dispatch>>, usize) {
    let changes = index.update(input);
    let ports = index.desired().ports.values();
    (ports.flat_map(|port| &port.cluster).map(|endpoint| endpoint.opens).collect(), changes.ports.len())
}

#[test]
fn they_name_the_endpoint_until_all_nodes_have_heard_of_them() {
    let (mut index, input) = answered();
    index.follow_recent(BTreeSet::new());
    apply(&mut index, direct(1, true), &[("there", 1)]);
    index.set_synced();
    assert_eq!(opens(&mut index, &input), (vec![NAMED], 1));
    for _ in 0..3 {
        assert!(!index.age_services());
    }
    apply(&mut index, direct(2, true), &[("there", 2)]);
    assert!(index.age_services());
    assert_eq!(opens(&mut index, &input), (vec![BY_MAC, NAMED], 2));
    // Endpoints come and go with the Service as it is; an address that it gains is one to hear of.
    apply(&mut index, direct(1, true), &[("there", 3)]);
    assert_eq!(opens(&mut index, &input), (vec![BY_MAC, NAMED], 1));
    apply(&mut index, direct(1, false), &[("there", 3)]);
    assert_eq!(opens(&mut index, &input), (vec![NAMED, NAMED], 1));
    assert!(!index.age_services() && !index.age_services());
    assert!(index.age_services(), "the second Service is known");
    assert_eq!(opens(&mut index, &input), (vec![NAMED, BY_MAC], 1));
    index.delete::<Service>(&direct(1, false).name);
    assert_eq!(opens(&mut index, &input), (vec![BY_MAC], 1));
    assert!(!index.age_services(), "it is gone");
}

#[test]
fn those_that_were_known_before_the_start_go_on() {
    let (mut index, input) = answered();
    index.follow_recent(BTreeSet::from([direct(1, true).name, direct(2, true).name]));
    apply(&mut index, direct(1, true), &[("there", 1)]);
    index.set_synced();
    assert_eq!(opens(&mut index, &input), (vec![BY_MAC], 1));
    assert!(!index.age_services());
    // Not in the first lists: it has come anew under that name.
    apply(&mut index, direct(2, true), &[("there", 2)]);
    assert_eq!(opens(&mut index, &input), (vec![BY_MAC, NAMED], 1));
}

#[test]
fn none_is_recent_where_somebody_has_chosen() {
    let (mut index, input) = answered();
    apply(&mut index, direct(1, true), &[("there", 1)]);
    assert_eq!(opens(&mut index, &input), (vec![BY_MAC], 1));
}
