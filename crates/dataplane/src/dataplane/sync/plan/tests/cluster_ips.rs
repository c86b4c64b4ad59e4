//! ClusterIPs: when they are known and forgotten, what a plan looks at, and what the prefilter
//! keeps of what has gone.

use super::*;

/// A known address with an unknown port is rejected; therefore an address becomes known after its
/// ports, and is forgotten before them.
#[test]
fn cluster_ips_are_known_last_and_forgotten_first() {
    let frontend = |address: &str| traffic_policy_cluster::model::Frontend {
        address: address.parse().unwrap(),
        kind: FrontendKind::ClusterIp,
    };
    let with = |addresses: &[&str]| {
        let mut port = port(A, Policy::Cluster, &[endpoint("10.0.0.1:80", false)]);
        port.frontends = addresses.iter().map(|address| frontend(address)).collect();
        Some(port)
    };
    let address: IpAddr = "10.96.0.1".parse().unwrap();
    let mut node = Node::new();
    node.desired.service_cidrs.insert("10.96.0.0/16".parse().unwrap());
    node.set_cluster_ip(address, true);
    let plan = node.set("a", with(&["10.96.0.1:80"]));
    assert!(
        matches!(plan.ops[..], [.., Op::SetFrontend(..), Op::ClusterIp(_, true), Op::ServiceCidr(_, true)]),
        "{plan:?}"
    );
    node.restart();
    assert_eq!(node.plan(&[]).ops, []);
    node.desired.service_cidrs.clear();
    node.set_cluster_ip(address, false);
    let plan = node.set("a", None);
    assert!(
        matches!(
            plan.ops[..],
            [Op::ClusterIp(_, false), Op::ServiceCidr(_, false), Op::DeleteFrontend(_), Op::ClearInfo(_)]
        ),
        "{plan:?}"
    );
}

/// Services that are added one by one cost the same each, however many others there are.
#[test]
fn a_plan_looks_at_the_cluster_ips_that_changed() {
    const ALL: u32 = 10_000;
    let capacity = Capacity { frontends: [2 * ALL, 100], ..CAPACITY };
    let mut node = Node { planner: Planner::new(Held::default(), capacity), ..Node::new() };
    let address = |number: u32| IpAddr::from(std::net::Ipv4Addr::from(0x0a60_0000 + number));
    for number in 0..ALL {
        node.set_cluster_ip(address(number), true);
        assert_eq!(node.plan(&[]).ops, [Op::ClusterIp(address(number), true)]);
    }
    assert_eq!(node.planner.looked_at, 3 * ALL as usize);
    for number in 0..ALL {
        node.set_cluster_ip(address(number), false);
        assert_eq!(node.plan(&[]).ops, [Op::ClusterIp(address(number), false)]);
    }
    assert_eq!(node.planner.looked_at, 5 * ALL as usize);
}

/// The prefilter is made anew, which takes time for each Service, only if something has gone.
#[test]
fn what_goes_leaves_bits_in_the_prefilter() {
    let mut node = Node::new();
    let leaves_bits = |plan: &Plan| plan.ops.iter().any(Op::leaves_bits);
    let of = |text: &str| Some(port(A, Policy::Cluster, &[endpoint(text, false)]));
    for endpoint in ["10.0.0.1:80", "10.0.0.2:80"] {
        let plan = node.set("a", of(endpoint));
        assert!(!plan.ops.is_empty() && !leaves_bits(&plan), "{plan:?}");
    }
    node.set_cluster_ip("10.96.0.1".parse().unwrap(), true);
    assert!(!leaves_bits(&node.plan(&[])));
    node.set_cluster_ip("10.96.0.1".parse().unwrap(), false);
    assert!(leaves_bits(&node.plan(&[])));
    assert!(leaves_bits(&node.set("a", None)));
}
