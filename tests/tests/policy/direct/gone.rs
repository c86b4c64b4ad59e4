//! The addresses of nodes whose Leases are gone, in the maps of the packet path: what comes from
//! them is opened for some time more.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use traffic_policy_cluster::model::{Changes, Desired};
use traffic_policy_dataplane::direct::Direct;
use traffic_policy_dataplane::sync::op::Held;
use traffic_policy_dataplane::sync::plan::Planner;
use traffic_policy_dataplane::{Kernel, MapSizes, Maps, load};
use traffic_policy_testing::bpf_map::BpfMap;
use traffic_policy_testing::harness::descriptor;

/// The time for which an address counts after its Lease.
const LASTS: u64 = 80;
/// The time for which an agent that knows of no other node leaves everything as it was.
const KEPT: u64 = 1800;

const A: [&str; 2] = ["192.0.2.1", "2001:db8::1"];
const B: [&str; 2] = ["192.0.2.2", "2001:db8::2"];
/// Both nodes.
const BOTH: [[&str; 2]; 2] = [A, B];

/// Maps of their own, and what an agent does with them at moments of its life, in seconds.
struct Node {
    direct: Direct,
    planner: Planner,
    /// The addresses from which packets are opened: IPv4, IPv6.
    from: [BpfMap; 2],
    start: Instant,
}

impl Node {
    /// Starts with what an earlier agent has left: the addresses of these nodes.
    fn start(left: &[[&str; 2]]) -> Self {
        let mut object = load(MapSizes::default(), None, &Kernel::running().unwrap()).unwrap();
        let from = ["tp_direct_from4", "tp_direct_from6"].map(|name| {
            let fd = descriptor(object.map(name).unwrap()).unwrap();
            BpfMap::new(fd.try_clone_to_owned().unwrap()).unwrap()
        });
        for (number, node) in (1_u32..).zip(left) {
            for (map, address) in from.iter().zip(node) {
                map.write(&octets(address), &number.to_ne_bytes()).unwrap();
            }
        }
        let capacity = Maps::take(&mut object).unwrap().room.plan_capacity();
        let start = Instant::now();
        let direct = Direct::open(&mut object, start).unwrap();
        Self { direct, planner: Planner::new(Held::default(), capacity), from, start }
    }

    fn at(&self, seconds: u64) -> Instant {
        self.start + Duration::from_secs(seconds)
    }

    /// Writes the addresses of the nodes with a Lease; `all`: everything is compared.
    fn sync(&mut self, nodes: &[[&str; 2]], all: bool, seconds: u64) {
        let direct_nodes = nodes.iter().flatten().map(|address| address.parse().unwrap()).collect();
        let desired = Desired { direct_nodes, ..Desired::default() };
        let now = self.at(seconds);
        let own = BTreeSet::new();
        self.direct.sync(&desired, &Changes::default(), &self.planner, &own, all, now).unwrap();
    }

    /// Sweeps, and returns the nodes whose addresses are there. Both families agree.
    fn left(&mut self, seconds: u64) -> Vec<[&'static str; 2]> {
        self.direct.forget_nodes(self.at(seconds)).unwrap();
        let [v4, v6] = [0, 1].map(|family| {
            let held = self.from[family].read().unwrap();
            BOTH.into_iter().filter(|node| held.contains_key(&octets(node[family]))).collect::<Vec<_>>()
        });
        assert_eq!(v4, v6, "{seconds} s");
        v4
    }
}

fn octets(address: &str) -> Vec<u8> {
    match address.parse().unwrap() {
        IpAddr::V4(address) => address.octets().to_vec(),
        IpAddr::V6(address) => address.octets().to_vec(),
    }
}

#[test]
fn an_address_goes_80_seconds_after_its_lease() {
    let mut node = Node::start(&[]);
    node.sync(&BOTH, true, 0);
    node.sync(&[B], false, 100);
    assert_eq!(node.left(100 + LASTS - 1), BOTH);
    // Its Lease is back for a moment.
    node.sync(&BOTH, false, 179);
    node.sync(&[B], false, 180);
    assert_eq!(node.left(180 + LASTS - 1), BOTH);
    assert_eq!(node.left(180 + LASTS), [B]);
}

#[test]
fn a_start_begins_anew_to_count() {
    let mut node = Node::start(&BOTH);
    node.sync(&[B], true, 5);
    assert_eq!(node.left(5 + LASTS - 1), BOTH);
    assert_eq!(node.left(5 + LASTS), [B]);
}

/// An agent whose start is not half an hour ago, and that has seen other nodes.
#[test]
fn all_go_soon_after_a_start() {
    let mut node = Node::start(&BOTH);
    node.sync(&BOTH, true, 0);
    node.sync(&[], false, 10);
    assert_eq!(node.left(10 + LASTS - 1), BOTH);
    assert_eq!(node.left(10 + LASTS), [[""; 2]; 0]);
}

/// An agent that may have been started without `--announce-opening`: the others do not know yet.
#[test]
fn what_an_earlier_agent_has_left_stays_while_nobody_is_known() {
    let mut node = Node::start(&BOTH);
    node.sync(&[], true, 0);
    node.sync(&[], true, KEPT - 1);
    assert_eq!(node.left(KEPT - 1), BOTH);
    node.sync(&[], false, KEPT);
    assert_eq!(node.left(KEPT + LASTS - 1), BOTH);
    assert_eq!(node.left(KEPT + LASTS), [[""; 2]; 0]);
}
