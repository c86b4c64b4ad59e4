//! Maglev tables: when they are written, kept, freed, and what happens without room for one. There
//! is room for four tables of 251 slots.

use traffic_policy_ebpf::abi::maglev;

use super::*;
use crate::dataplane::sync::ranges::QUARANTINE;

fn maglev(address: &str, endpoints: &[Endpoint]) -> ServicePort {
    ServicePort { algorithm: Algorithm::Maglev, ..port(address, Policy::Cluster, endpoints) }
}

fn three() -> [Endpoint; 3] {
    ["10.0.0.1:8080", "10.0.0.2:8080", "10.0.0.3:8080"].map(|text| endpoint(text, false))
}

fn tables(plan: &Plan) -> Vec<&Op> {
    plan.ops.iter().filter(|op| matches!(op, Op::Table { .. })).collect()
}

fn frontend_of(node: &Node) -> Frontend {
    *node.planner.frontends().values().next().unwrap()
}

#[test]
fn a_table_precedes_its_frontend_and_moves_with_the_list() {
    let mut node = Node::new();
    let plan = node.set("a", Some(maglev("192.0.2.1:30080", &three())));
    let place = |wanted: &dyn Fn(&Op) -> bool| plan.ops.iter().position(wanted).unwrap();
    assert!(place(&|op| matches!(op, Op::Table { .. })) < place(&|op| matches!(op, Op::SetFrontend(..))));
    let Op::Table { base, elements } = tables(&plan)[0] else { unreachable!() };
    let first = frontend_of(&node);
    assert_eq!((first.maglev.base, first.maglev.len, elements.len()), (*base, 251, 63));
    assert_ne!(first.flags & frontend::MAGLEV, 0);

    // Another list has another table, in other elements, with one write of the frontend.
    let plan = node.set("a", Some(maglev("192.0.2.1:30080", &three()[..2])));
    assert_eq!(tables(&plan).len(), 1);
    let second = frontend_of(&node);
    assert_ne!((second.maglev.base, second.digest), (first.maglev.base, first.digest));
    assert_eq!(node.planner.usage().tables, 63);

    let plan = node.set("a", Some(port("192.0.2.1:30080", Policy::Cluster, &three()[..2])));
    assert_eq!(tables(&plan), Vec::<&Op>::new());
    let last = frontend_of(&node);
    assert_eq!((last.maglev, last.digest, last.flags & frontend::MAGLEV), (IndexRange::default(), 0, 0));
    assert_eq!(node.planner.usage().tables, 0);
}

#[test]
fn what_does_not_change_the_endpoints_writes_no_table() {
    let mut node = Node::new();
    node.set("a", Some(maglev("192.0.2.1:30080", &three())));
    // The number of a node is in the slots, not in the table.
    let renumbered = three().map(|endpoint| Endpoint { node: 7, ..endpoint });
    let plan = node.set("a", Some(maglev("192.0.2.1:30080", &renumbered)));
    assert!(!plan.ops.is_empty() && tables(&plan).is_empty(), "{:?}", plan.ops);
    node.restart();
    let plan = node.set("a", Some(maglev("192.0.2.1:30080", &renumbered)));
    assert!(plan.ops.is_empty(), "an earlier agent has written it: {:?}", plan.ops);
    assert_eq!(node.planner.usage().tables, 63);
}

#[test]
fn no_table_without_endpoints() {
    let mut node = Node::new();
    let plan = node.set("a", Some(maglev("192.0.2.1:30080", &[])));
    assert!(tables(&plan).is_empty() && plan.left_out.is_empty());
}

#[test]
fn without_room_the_choice_is_random_until_there_is_some() {
    let mut node = Node::new();
    for (name, number) in [("a", 1), ("b", 2), ("c", 3), ("d", 4)] {
        assert!(
            node.set(name, Some(maglev(&format!("192.0.2.1:3000{number}"), &three()))).left_out.is_empty()
        );
    }
    let plan = node.set("e", Some(maglev("192.0.2.1:30005", &three())));
    assert_eq!(plan.left_out.iter().map(|out| out.lack).collect::<Vec<_>>(), [Lack::Tables]);
    let of_e = |node: &Node| {
        let frontends = node.planner.frontends().iter();
        *frontends.clone().find(|(id, _)| id.address.port() == 30_005).unwrap().1
    };
    assert_eq!((of_e(&node).flags & frontend::MAGLEV, of_e(&node).cluster.len), (0, 3));

    node.set("a", None);
    node.now += QUARANTINE;
    let plan = node.plan(&[key("e")]);
    assert_eq!((plan.left_out.len(), tables(&plan).len()), (0, 1));
    assert_ne!(of_e(&node).flags & frontend::MAGLEV, 0);
}

#[test]
fn more_endpoints_than_slots_are_chosen_at_random() {
    let mut node = Node::new();
    node.planner = Planner::new(Held::default(), Capacity { slots: 1000, ..CAPACITY });
    let many: Vec<_> = (0..252).map(|last| endpoint(&format!("10.0.1.{last}:80"), false)).collect();
    let many: Vec<_> = many.into_iter().chain(three()).collect();
    let plan = node.set("a", Some(maglev("192.0.2.1:30080", &many)));
    let lacks: Vec<_> = plan.left_out.iter().map(|out| out.lack).collect();
    assert_eq!(lacks, [Lack::TableSlots { endpoints: 255, slots: 251 }]);
    assert_eq!(frontend_of(&node).flags & frontend::MAGLEV, 0);
}

#[test]
fn another_weight_is_another_table_for_the_same_list() {
    let mut node = Node::new();
    node.set("a", Some(maglev("192.0.2.1:30080", &three())));
    let first = frontend_of(&node);
    let [one, two, three] = three();
    let plan = node.set("a", Some(maglev("192.0.2.1:30080", &[Endpoint { weight: 2, ..one }, two, three])));
    let Op::Table { elements, .. } = tables(&plan)[0] else { unreachable!() };
    let places = (0..251).map(|slot| maglev::place(elements[maglev::element_of(slot) as usize], slot));
    let of_first = places.filter(|place| *place == 0).count();
    assert!((125..=126).contains(&of_first), "{of_first} of 251 slots by weights 2, 1, 1");
    let second = frontend_of(&node);
    assert_ne!(second.digest, first.digest);
    assert_eq!(second.cluster, first.cluster, "the list stays");
    node.restart();
    let plan = node.set("a", Some(maglev("192.0.2.1:30080", &[Endpoint { weight: 2, ..one }, two, three])));
    assert!(plan.ops.is_empty(), "an earlier agent has written it: {:?}", plan.ops);
}

/// 500 Service ports in a map that has room for twelve tables more, one of which changes every 70
/// ms: 14 tables a second. Each change writes its own table alone, and the next need not wait.
#[test]
fn many_tables_with_little_room_change_one_after_the_other_without_a_pause() {
    const SERVICES: u32 = 500;
    let capacity = Capacity {
        frontends: [SERVICES; 2],
        slots: 4 * SERVICES,
        services: 2 * SERVICES,
        tables: (SERVICES + 12) * maglev::elements(251),
        ..CAPACITY
    };
    let mut node = Node { planner: Planner::new(Held::default(), capacity), ..Node::new() };
    let name = |number: u32| format!("s{number}");
    let of = |number: u32, endpoints: &[Endpoint]| {
        Some(maglev(&format!("192.0.2.1:{}", 30_000 + number), endpoints))
    };
    for number in 0..SERVICES {
        let port = of(number, &three()).unwrap();
        node.desired.ports.insert(key(&name(number)), port.into());
    }
    assert_eq!(tables(&node.plan(&[])).len(), SERVICES as usize);
    node.planner.written(node.now);
    for change in 0..150 {
        node.now += Duration::from_millis(70);
        let number = change / 2 * 7_919 % SERVICES;
        let plan = node.set(&name(number), of(number, &three()[..if change % 2 == 0 { 2 } else { 3 }]));
        assert!(plan.left_out.is_empty(), "change {change}: {:?}", plan.left_out);
        assert_eq!((tables(&plan).len(), plan.ops.len()), (1, 3), "list, table, frontend: {:?}", plan.ops);
        node.planner.written(node.now);
        // The run loop's own distance of two writes.
        let pause = node.planner.pause();
        assert!(pause <= Duration::from_millis(50), "{pause:?} after change {change}");
    }
}

/// A table that a frontend named until just now is not written over, however long the write took.
#[test]
fn a_table_rests_from_the_write_on_that_replaced_it() {
    let mut node = Node::new();
    for (name, number) in [("a", 1), ("b", 2), ("c", 3)] {
        node.set(name, Some(maglev(&format!("192.0.2.1:3000{number}"), &three())));
    }
    let change = |node: &mut Node, endpoints: &[Endpoint]| -> Vec<Lack> {
        let plan = node.set("a", Some(maglev("192.0.2.1:30001", endpoints)));
        plan.left_out.iter().map(|out| out.lack).collect()
    };
    // The last room.
    assert_eq!(change(&mut node, &three()[..2]), []);
    node.now += Duration::from_millis(500);
    node.planner.written(node.now);
    node.now += Duration::from_millis(49);
    assert_eq!(change(&mut node, &three()), [Lack::Tables]);
    node.planner.written(node.now);
    node.now += Duration::from_millis(1);
    assert_eq!(change(&mut node, &three()), []);
}
