//! Former owners of Maglev tables: when they are written, kept, forgotten, and what happens without
//! room for them. There is room for four tables of 251 slots.

use traffic_policy_cluster::model::{Dispatch, Forwarding};

use super::*;
use crate::dataplane::sync::{former::LASTS, ranges::QUARANTINE};

const ADDRESS: &str = "192.0.2.1:30080";

fn direct(endpoints: &[Endpoint]) -> ServicePort {
    let port = port(ADDRESS, Policy::Cluster, endpoints);
    ServicePort { algorithm: Algorithm::Maglev, forwarding: Forwarding::Direct, ..port }
}

fn of(names: &[u8]) -> Vec<Endpoint> {
    let opening = |name: &u8| Endpoint {
        opens: Some(Dispatch::Ipip),
        held: None,
        ..endpoint(&format!("10.0.0.{name}:8080"), false)
    };
    names.iter().map(opening).collect()
}

impl Node {
    fn change(&mut self, names: &[u8]) -> Plan {
        self.now += QUARANTINE;
        self.set("a", Some(direct(&of(names))))
    }

    /// The endpoints that the frontend names as former owners.
    fn former(&self) -> Vec<Endpoint> {
        self.planner.lists.get(false, self.frontend(ADDRESS).former_list).to_vec()
    }

    fn pass(&mut self, time: Duration) {
        self.now += time;
        self.monotonic += time.as_nanos() as u64;
    }
}

#[test]
fn who_leaves_is_a_former_owner_for_some_time() {
    let mut node = Node::new();
    node.change(&[1, 2, 3]);
    assert_eq!((node.frontend(ADDRESS).former.len, node.frontend(ADDRESS).former_until), (0, 0));
    let plan = node.change(&[1, 2]);
    let frontend = node.frontend(ADDRESS);
    assert!(node.former().contains(&of(&[3])[0]));
    assert_eq!((frontend.former.len, node.planner.usage().tables), (1, 2 * 63));
    assert_eq!(frontend.former_until, node.monotonic + LASTS.as_nanos() as u64);
    let place = |wanted: &dyn Fn(&Op) -> bool| plan.ops.iter().rposition(wanted).unwrap();
    assert!(place(&|op| matches!(op, Op::Table { .. })) < place(&|op| matches!(op, Op::SetFrontend(..))));
    // Other changes touch nothing of it.
    node.pass(LASTS / 2);
    node.set("b", Some(port("192.0.2.1:30081", Policy::Cluster, &of(&[1]))));
    assert_eq!(node.frontend(ADDRESS), frontend);
    // Afterwards the next change, of whatever Service, forgets it.
    node.pass(LASTS / 2);
    let plan = node.set("b", None);
    let frontend = node.frontend(ADDRESS);
    assert_eq!((frontend.former, frontend.former_list, frontend.former_until), Default::default());
    assert_eq!((node.planner.usage().tables, node.planner.usage().slots[0]), (63, 2), "{:?}", plan.ops);
    assert!(node.set("b", None).ops.is_empty());
}

/// A change of one Service among many does not look through all of them.
#[test]
fn they_are_looked_for_when_some_are_due() {
    let mut node = Node::new();
    for other in 1..=9 {
        node.set(&format!("b{other}"), Some(port(&format!("192.0.2.1:3009{other}"), Policy::Cluster, &[])));
    }
    node.change(&[1, 2, 3]);
    node.change(&[1, 2]);
    node.pass(LASTS - Duration::from_secs(1));
    node.set("b1", None);
    assert_eq!(node.planner.examined, 0);
    node.pass(Duration::from_secs(1));
    node.set("b2", None);
    assert_eq!((node.frontend(ADDRESS).former.len, node.planner.examined), (0, 9));
    node.pass(LASTS);
    node.set("b3", None);
    assert_eq!(node.planner.examined, 9, "none is left");
}

#[test]
fn a_later_agent_finds_them_and_goes_on() {
    let mut node = Node::new();
    node.change(&[1, 2, 3]);
    node.change(&[1, 2]);
    node.restart_in(Capacity { tables: 5 * 63, ..CAPACITY });
    let plan = node.set("a", Some(direct(&of(&[1, 2]))));
    assert!(plan.ops.is_empty(), "an earlier agent has written it: {:?}", plan.ops);
    node.change(&[1]);
    assert_eq!(node.frontend(ADDRESS).former.len, 2, "before the second there was the third");
    assert!(of(&[2, 3]).iter().all(|endpoint| node.former().contains(endpoint)), "{:?}", node.former());
    assert_eq!((node.planner.usage().tables, node.planner.usage().slots[0]), (3 * 63, 3));
}

#[test]
fn without_room_only_they_are_left_out() {
    let mut node = Node::new();
    for (name, number) in [("b", 1), ("c", 2)] {
        let mut port = direct(&of(&[1, 2]));
        port.frontends = port_of(number);
        node.set(name, Some(port));
    }
    node.change(&[1, 2, 3]);
    // The new table takes the last room.
    let plan = node.change(&[1, 2]);
    let frontend = node.frontend(ADDRESS);
    assert!(plan.left_out.is_empty() && frontend.flags & frontend::MAGLEV != 0);
    assert_eq!((frontend.former.len, frontend.former_list.len), (0, 0));
    assert_eq!((node.planner.usage().tables, node.planner.usage().slots[0]), (3 * 63, 6));
}

fn port_of(number: u16) -> BTreeSet<traffic_policy_cluster::model::Frontend> {
    port(&format!("192.0.2.1:3100{number}"), Policy::Cluster, &[]).frontends
}

#[test]
fn nobody_is_asked_where_flows_have_this_nodes_address() {
    let mut node = Node::new();
    node.change(&[1, 2, 3]);
    node.change(&[1, 2]);
    let snat = ServicePort { forwarding: Forwarding::Snat, ..direct(&of(&[1, 2])) };
    node.set("a", Some(snat));
    assert_eq!((node.frontend(ADDRESS).former.len, node.planner.usage().tables), (0, 63));
    node.set("a", None);
    assert_eq!((node.planner.usage().tables, node.planner.usage().slots[0]), (0, 0));
}

#[test]
fn a_service_that_goes_takes_them_along() {
    let mut node = Node::new();
    node.change(&[1, 2, 3]);
    node.change(&[1, 2]);
    node.restart();
    node.set("a", None);
    assert_eq!((node.planner.usage().tables, node.planner.usage().slots[0]), (0, 0));
}
