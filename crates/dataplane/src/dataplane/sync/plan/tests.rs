//! Tests of a plan: the writes, their order, and the writes that are omitted.

mod cluster_ips;
mod drains;
mod history;
mod owners;
mod room;
mod tables;

use anyhow::Context as _;
use traffic_policy_cluster::model::{Algorithm, FrontendKind, Policy, Protocol, ServiceName};
use traffic_policy_ebpf::abi::{frontend, frontend_kind, maglev};

use super::*;

const CAPACITY: Capacity =
    Capacity { frontends: [100, 100], source_ranges: [100, 100], slots: 100, services: 200, tables: 256 };

fn key(name: &str) -> ServicePortKey {
    let service = ServiceName { namespace: "default".into(), name: name.into() };
    ServicePortKey { service, port: String::new(), protocol: Protocol::Tcp, ipv6: false }
}

fn endpoint(text: &str, local: bool) -> Endpoint {
    Endpoint::new(text.parse().unwrap(), local)
}

fn port(address: &str, policy: Policy, endpoints: &[Endpoint]) -> ServicePort {
    let local = endpoints.iter().filter(|e| e.local && policy == Policy::Local).copied().collect();
    ServicePort {
        frontends: [traffic_policy_cluster::model::Frontend {
            address: address.parse().unwrap(),
            kind: FrontendKind::NodePort,
        }]
        .into(),
        external_policy: policy,
        external_fallback: false,
        forwarding: traffic_policy_cluster::model::Forwarding::Snat,
        here: BTreeSet::new(),
        internal_policy: Policy::Cluster,
        cluster: endpoints.to_vec(),
        local,
        has_endpoints: !endpoints.is_empty(),
        serving: endpoints.iter().map(|e| e.address).collect(),
        drain: None,
        source_ranges: vec![],
        affinity: None,
        algorithm: Algorithm::Random,
    }
}

struct Node {
    planner: Planner,
    /// The ClusterIPs that changed since the last plan.
    cluster_ips: BTreeSet<IpAddr>,
    desired: Desired,
    addresses: BTreeSet<IpAddr>,
    now: Instant,
    monotonic: u64,
    /// Whether there are programs for SCTP.
    sctp: bool,
    table_size: TableSize,
    /// The elements of Maglev tables that were written.
    elements: BTreeMap<u32, u64>,
}

impl Node {
    fn new() -> Self {
        Self {
            planner: Planner::new(Held::default(), CAPACITY),
            cluster_ips: BTreeSet::new(),
            desired: Desired::default(),
            addresses: ["192.0.2.1".parse().unwrap()].into(),
            now: Instant::now(),
            monotonic: 1_000,
            sctp: false,
            table_size: "251".parse().unwrap(),
            elements: BTreeMap::new(),
        }
    }

    fn set(&mut self, name: &str, port: Option<ServicePort>) -> Plan {
        match port {
            Some(port) => self.desired.ports.insert(key(name), port.into()),
            None => self.desired.ports.remove(&key(name)),
        };
        self.plan(&[key(name)])
    }

    fn plan(&mut self, changed: &[ServicePortKey]) -> Plan {
        let table = |range: IndexRange| {
            let elements = range.base..range.base + maglev::elements(range.len);
            let elements =
                elements.map(|index| self.elements.get(&index).copied()).collect::<Option<Vec<_>>>();
            Ok(maglev::unpack(&elements.context("not written")?, range.len).collect())
        };
        let context = Context {
            tables: &table,
            addresses: &self.addresses,
            drain: Duration::from_secs(30),
            monotonic: self.monotonic,
            now: self.now,
            adopting: false,
            table_size: self.table_size,
            sctp: self.sctp,
        };
        let changes = Changes {
            ports: changed.iter().cloned().collect(),
            cluster_ips: std::mem::take(&mut self.cluster_ips),
            ..Changes::default()
        };
        let plan = self.planner.plan(&self.desired, &changes, &context);
        for op in &plan.ops {
            if let Op::Table { base, elements } = op {
                self.elements.extend((*base..).zip(elements.iter().copied()));
            }
        }
        plan
    }

    /// Makes the address a ClusterIP of one Service, or of none.
    fn set_cluster_ip(&mut self, address: IpAddr, is_one: bool) {
        if is_one {
            self.desired.cluster_ips.insert(address, 1);
        } else {
            self.desired.cluster_ips.remove(&address);
        }
        self.cluster_ips.insert(address);
    }

    /// Simulates another agent that takes over what this one has written.
    fn restart(&mut self) {
        self.restart_in(CAPACITY);
    }

    /// Simulates the same, in maps of this size.
    fn restart_in(&mut self, capacity: Capacity) {
        let held = Held {
            frontends: self.planner.held.frontends.clone(),
            slots: self.planner.lists.held.clone(),
            sources: self.planner.held.sources.clone(),
            names: self.planner.held.names.clone(),
            cluster_ips: self.planner.held.cluster_ips.clone(),
            service_cidrs: self.planner.held.service_cidrs.clone(),
        };
        self.planner = Planner::new(held, capacity);
    }

    fn frontend(&self, address: &str) -> Frontend {
        self.planner.held.frontends
            [&FrontendId { address: address.parse().unwrap(), protocol: Protocol::Tcp }]
    }
}

fn keys(plan: &Plan) -> Vec<ServicePortKey> {
    plan.left_out.iter().map(|left_out| left_out.key.clone()).collect()
}

const A: &str = "192.0.2.1:30080";
const B: &str = "192.0.2.1:30081";

#[test]
fn slots_before_frontends_and_nothing_twice() {
    let mut node = Node::new();
    let plan = node.set("a", Some(port(A, Policy::Cluster, &[endpoint("10.0.0.1:80", false)])));
    assert!(matches!(plan.ops[..], [Op::Slots { .. }, Op::SetInfo(..), Op::SetFrontend(..)]), "{plan:?}");
    let kind = frontend_kind::NODE_PORT << frontend::KIND_SHIFT;
    assert_eq!(node.frontend(A).flags, frontend::HAS_ENDPOINTS | frontend::NODE_ADDRESS | kind);
    assert_eq!(node.plan(&[key("a")]).ops, []);
    // Another Service does not change the first one's entries.
    let plan = node.set("b", Some(port(B, Policy::Cluster, &[endpoint("10.0.0.2:80", false)])));
    assert_eq!(plan.ops.len(), 3);
    assert_ne!(node.frontend(A).cluster, node.frontend(B).cluster);
    assert_ne!(node.frontend(A).service, node.frontend(B).service);
}

#[test]
fn takeover_without_a_change_writes_nothing() {
    let mut node = Node::new();
    let _ = node.set(
        "a",
        Some(port(A, Policy::Local, &[endpoint("10.0.0.1:80", true), endpoint("10.0.1.1:80", false)])),
    );
    let _ = node.set("b", Some(port(B, Policy::Cluster, &[])));
    node.restart();
    let plan = node.plan(&[]);
    assert_eq!(plan.ops, []);
    assert!(plan.removed.is_empty());
}

#[test]
fn takeover_finds_what_changed_meanwhile() {
    let mut node = Node::new();
    let _ = node.set(
        "a",
        Some(port(A, Policy::Cluster, &[endpoint("10.0.0.1:80", false), endpoint("10.0.0.2:80", false)])),
    );
    let _ = node.set("b", Some(port(B, Policy::Cluster, &[endpoint("10.0.0.3:80", false)])));
    let (index, other) = (node.frontend(A).service, node.frontend(B).service);
    node.restart();
    node.desired.ports.remove(&key("b"));
    node.desired.ports.insert(key("a"), port(A, Policy::Cluster, &[endpoint("10.0.0.2:80", false)]).into());
    let plan = node.plan(&[]);
    assert!(
        matches!(
            plan.ops[..],
            [Op::Slots { .. }, Op::SetFrontend(..), Op::DeleteFrontend(_), Op::ClearInfo(_)]
        ),
        "{plan:?}"
    );
    assert_eq!(node.frontend(A).service, index, "the Service keeps its index");
    let removed: Vec<_> =
        plan.removed.keys().map(|removed| (removed.service, removed.endpoint.to_string())).collect();
    assert_eq!(removed, [(index, "10.0.0.1:80".to_owned()), (other, "10.0.0.3:80".to_owned())]);
}

/// Clients of datagrams may send for ever, and hear of nothing: their direct flows choose anew once
/// the endpoint's node opens no packets. Connections end by themselves.
#[test]
fn direct_datagrams_leave_endpoints_whose_node_opens_no_more() {
    use traffic_policy_cluster::model::{Dispatch, Forwarding};
    let [opens, held, closed] = [(Some(Dispatch::Ipip), None), (None, Some(Dispatch::Udp)), (None, None)]
        .map(|(opens, held)| Endpoint { remote: true, opens, held, ..endpoint("10.0.1.1:80", false) });
    let other = Endpoint { address: "10.0.1.2:80".parse().unwrap(), ..opens };
    for (protocol, [before, after], now, removed) in [
        (Protocol::Udp, [Forwarding::Direct, Forwarding::Direct], Some(closed), true),
        (Protocol::Udp, [Forwarding::Tunnel, Forwarding::Tunnel], Some(closed), true),
        (Protocol::Udp, [Forwarding::Direct, Forwarding::Direct], Some(held), false),
        (Protocol::Tcp, [Forwarding::Direct, Forwarding::Direct], Some(closed), false),
        (Protocol::Udp, [Forwarding::Direct, Forwarding::Snat], Some(closed), false),
        (Protocol::Udp, [Forwarding::Snat, Forwarding::Snat], Some(closed), false),
    ] {
        let mut node = Node::new();
        let key = ServicePortKey { protocol, ..key("a") };
        let mut set = |forwarding, endpoints: &[Endpoint]| {
            let port = ServicePort { forwarding, ..port(A, Policy::Cluster, endpoints) };
            node.desired.ports.insert(key.clone(), port.into());
            let removed = node.plan(std::slice::from_ref(&key)).removed;
            let is_serving = |(endpoint, from): (&_, &_)| node.planner.is_serving(endpoint, *from);
            assert!(!removed.iter().any(is_serving));
            removed
        };
        let _ = set(before, &[opens, other]);
        let found = set(after, &now.into_iter().chain([other]).collect::<Vec<_>>());
        let found: Vec<_> = found.iter().map(|(removed, from)| (removed.endpoint, *from)).collect();
        let expected = removed.then_some((opens.address, Removal::Opening));
        assert_eq!(found, expected.into_iter().collect::<Vec<_>>(), "{protocol:?} {before:?} {after:?}");
        assert!(set(before, &[opens, other]).is_empty(), "it opens again");
    }
}

/// The slots in the maps say which nodes opened packets before.
#[test]
fn direct_datagrams_leave_a_node_that_has_stopped_while_no_agent_ran() {
    use traffic_policy_cluster::model::{Dispatch, Forwarding};
    let opens = Endpoint { remote: true, opens: Some(Dispatch::Ipip), ..endpoint("10.0.1.1:80", false) };
    let key = ServicePortKey { protocol: Protocol::Udp, ..key("a") };
    for (after, removed) in [(opens, false), (Endpoint { opens: None, ..opens }, true)] {
        let mut node = Node::new();
        let plan = |node: &mut Node, endpoint| {
            let port =
                ServicePort { forwarding: Forwarding::Direct, ..port(A, Policy::Cluster, &[endpoint]) };
            node.desired.ports.insert(key.clone(), port.into());
            node.plan(std::slice::from_ref(&key)).removed
        };
        assert!(plan(&mut node, opens).is_empty());
        node.restart();
        let from: Vec<_> = plan(&mut node, after).into_values().collect();
        assert_eq!(from, if removed { vec![Removal::Opening] } else { vec![] });
    }
}

/// One that leaves its Service has left it for all flows.
#[test]
fn what_leaves_its_service_is_not_named_twice() {
    use traffic_policy_cluster::model::{Dispatch, Forwarding};
    let opens = Endpoint { remote: true, opens: Some(Dispatch::Ipip), ..endpoint("10.0.1.1:80", false) };
    let key = ServicePortKey { protocol: Protocol::Udp, ..key("a") };
    let mut node = Node::new();
    for endpoints in [&[opens][..], &[]] {
        let port = ServicePort { forwarding: Forwarding::Direct, ..port(A, Policy::Cluster, endpoints) };
        node.desired.ports.insert(key.clone(), port.into());
        let removed = node.plan(std::slice::from_ref(&key)).removed;
        let from: Vec<_> = removed.into_values().collect();
        assert_eq!(from, if endpoints.is_empty() { vec![Removal::Service] } else { vec![] });
    }
}

#[test]
fn an_endpoint_of_two_services_is_removed_for_the_one_that_loses_it() {
    let one = [endpoint("10.0.1.1:80", false)];
    let mut node = Node::new();
    let _ = node.set("a", Some(port(A, Policy::Cluster, &one)));
    let _ = node.set("b", Some(port(B, Policy::Cluster, &one)));
    let removed = |service| {
        let endpoint = one[0].address;
        let removed = RemovedEndpoint { service, endpoint, protocol: Protocol::Tcp };
        BTreeMap::from([(removed, Removal::Service)])
    };
    let (a, b) = (node.frontend(A).service, node.frontend(B).service);
    assert_eq!(node.set("a", None).removed, removed(a));
    let [of_a, of_b] = [a, b].map(|service| *removed(service).first_key_value().unwrap().0);
    let is_serving = |node: &Node, endpoint| node.planner.is_serving(endpoint, Removal::Service);
    assert!(!is_serving(&node, &of_a) && is_serving(&node, &of_b));
    assert_eq!(node.set("b", Some(port(B, Policy::Cluster, &[]))).removed, removed(b));
    let _ = node.set("b", Some(port(B, Policy::Cluster, &one)));
    assert!(is_serving(&node, &of_b), "again");
}

#[test]
fn a_frontend_that_moves_is_replaced_not_deleted() {
    let mut node = Node::new();
    let _ = node.set("a", Some(port(A, Policy::Cluster, &[endpoint("10.0.0.1:80", false)])));
    let moved = node.desired.ports.remove(&key("a")).unwrap();
    node.desired.ports.insert(key("b"), moved);
    let plan = node.plan(&[key("a"), key("b")]);
    assert!(plan.ops.iter().all(|op| !matches!(op, Op::DeleteFrontend(_))), "{plan:?}");
}

/// A port that is renamed keeps its index, by which its flows and sockets refer to it.
#[test]
fn who_takes_over_a_frontend_takes_over_the_index() {
    let two = [endpoint("10.0.0.1:80", false), endpoint("10.0.0.2:80", false)];
    let mut node = Node::new();
    let _ = node.set("a", Some(port(A, Policy::Cluster, &two)));
    let before = node.frontend(A);
    node.desired.ports.remove(&key("a"));
    node.desired.ports.insert(key("b"), port(A, Policy::Cluster, &two[1..]).into());
    let plan = node.plan(&[key("a"), key("b")]);
    assert_eq!(node.frontend(A).service, before.service);
    let removed: Vec<_> = plan.removed.keys().map(|removed| (removed.service, removed.endpoint)).collect();
    assert_eq!(removed, [(before.service, two[0].address)]);
    assert!(plan.ops.iter().all(|op| !matches!(op, Op::ClearInfo(_))), "{plan:?}");
    assert_eq!(node.planner.usage().services, 1);
    let _ = node.set("b", None);
    assert_eq!(node.planner.usage(), Usage::default());
}

const VIP: &str = "203.0.113.1:80";

/// Returns a load balancer with source ranges.
fn guarded(endpoints: &[Endpoint], ranges: &[&str]) -> ServicePort {
    let frontend = traffic_policy_cluster::model::Frontend {
        address: VIP.parse().unwrap(),
        kind: FrontendKind::LoadBalancer,
    };
    ServicePort {
        frontends: [frontend].into(),
        source_ranges: ranges.iter().map(|range| range.parse().unwrap()).collect(),
        ..port(VIP, Policy::Cluster, endpoints)
    }
}

#[test]
fn sources_are_allowed_first_and_forbidden_last() {
    let vip = VIP;
    let with = |ranges: &[&str]| Some(guarded(&[endpoint("10.0.0.1:80", false)], ranges));
    let mut node = Node::new();
    let plan = node.set("a", with(&["198.51.100.0/24"]));
    assert!(
        matches!(
            plan.ops[..],
            [Op::Slots { .. }, Op::AddSourceRange(_), Op::SetInfo(..), Op::SetFrontend(..)]
        ),
        "{plan:?}"
    );
    assert_ne!(node.frontend(vip).flags & frontend::SOURCE_RANGES, 0);
    node.restart();
    assert_eq!(node.plan(&[]).ops, []);
    let plan = node.set("a", with(&["192.0.2.0/24"]));
    assert!(matches!(plan.ops[..], [Op::AddSourceRange(_), Op::RemoveSourceRange(_)]), "{plan:?}");
    let plan = node.set("a", with(&[]));
    assert!(matches!(plan.ops[..], [Op::SetFrontend(..), Op::RemoveSourceRange(_)]), "{plan:?}");
    let _ = node.set("a", with(&["192.0.2.0/24"]));
    let plan = node.set("a", None);
    assert!(
        matches!(plan.ops[..], [Op::DeleteFrontend(_), Op::ClearInfo(_), Op::RemoveSourceRange(_)]),
        "{plan:?}"
    );
}

#[test]
fn what_is_used_up_and_what_drains() {
    let remote = [endpoint("10.0.0.1:80", false), endpoint("10.0.0.2:80", false)];
    let mut node = Node::new();
    assert_eq!(node.planner.usage(), Usage::default());
    let _ = node.set("a", Some(port(A, Policy::Cluster, &remote)));
    let mut ranged = port("[2001:db8::1]:80", Policy::Cluster, &[endpoint("[2001:db8::2]:80", false)]);
    ranged.source_ranges = vec!["2001:db8:1::/48".parse().unwrap()];
    let six = ServicePortKey { ipv6: true, ..key("b") };
    node.desired.ports.insert(six.clone(), ranged.into());
    let _ = node.plan(&[six]);
    let both = Usage { frontends: [1, 1], slots: [2, 1], source_ranges: [0, 1], services: 2, tables: 0 };
    assert_eq!(node.planner.usage(), both);

    let _ = node.set("a", Some(port(A, Policy::Local, &remote)));
    assert_eq!(node.planner.draining(1_000), [(key("a"), Duration::from_secs(30))]);
    assert_eq!(node.planner.draining(30_000_001_000), [], "it is over");
    let _ = node.set("a", None);
    assert_eq!(node.planner.usage(), Usage { frontends: [0, 1], slots: [0, 1], services: 1, ..both });
}
