//! Drains: when a frontend that becomes one of policy Local begins one, and for how long.

use super::*;

#[test]
fn drains_only_when_the_policy_turns_local() {
    let remote = [endpoint("10.0.1.1:80", false)];
    let both = [endpoint("10.0.0.1:80", true), endpoint("10.0.1.1:80", false)];
    let mut node = Node::new();
    let _ = node.set("a", Some(port(A, Policy::Cluster, &remote)));
    let _ = node.set("a", Some(port(A, Policy::Local, &remote)));
    let until = 1_000 + 30_000_000_000;
    assert_eq!(node.frontend(A).drain_until, until);
    node.monotonic += 5_000_000_000;
    let _ = node.set("a", Some(port(A, Policy::Local, &[remote[0], endpoint("10.0.2.1:80", false)])));
    assert_eq!(node.frontend(A).drain_until, until, "another change neither prolongs nor ends it");
    node.restart();
    assert_eq!(node.plan(&[]).ops, [], "a takeover keeps a running drain");
    let _ = node.set("a", Some(port(A, Policy::Local, &both)));
    assert_eq!(node.frontend(A).drain_until, 0);
    let _ = node.set("a", Some(port(A, Policy::Local, &remote)));
    assert_eq!(node.frontend(A).drain_until, 0, "the last local endpoint left: no drain");
    let _ = node.set("b", Some(port(B, Policy::Local, &remote)));
    assert_eq!(node.frontend(B).drain_until, 0, "a new Service does not drain");
}

#[test]
fn annotation_overrides_the_drain() {
    let remote = [endpoint("10.0.1.1:80", false)];
    for (drain, until) in [(Duration::ZERO, 0), (Duration::from_secs(2), 2_000_001_000)] {
        let mut node = Node::new();
        let _ = node.set("a", Some(port(A, Policy::Cluster, &remote)));
        let _ = node.set("a", Some(ServicePort { drain: Some(drain), ..port(A, Policy::Local, &remote) }));
        assert_eq!(node.frontend(A).drain_until, until);
    }
}

/// The fallback treats policy Local as Cluster while there is no local endpoint; a drain begins
/// only when the fallback ends.
#[test]
fn the_fallback_is_policy_cluster_while_no_endpoint_is_here() {
    let (here, there) = (endpoint("10.0.0.1:80", true), endpoint("10.0.1.1:80", false));
    let service = |endpoints: &[Endpoint]| ServicePort {
        external_fallback: true,
        drain: Some(Duration::from_secs(2)),
        ..port(A, Policy::Local, endpoints)
    };
    let is_local = |node: &Node| node.frontend(A).flags & frontend::LOCAL != 0;
    let mut node = Node::new();
    let _ = node.set("a", Some(service(&[here, there])));
    assert!(is_local(&node));
    let lists = |node: &Node| (node.frontend(A).cluster.len, node.frontend(A).local.len);
    assert_eq!(lists(&node), (2, 1));
    // The last local endpoint leaves and returns.
    let plan = node.set("a", Some(service(&[there])));
    assert!(
        !is_local(&node) && plan.removed.keys().all(|removed| removed.endpoint == here.address),
        "{plan:?}"
    );
    assert_eq!((lists(&node), node.frontend(A).drain_until), ((1, 0), 0));
    let _ = node.set("a", Some(service(&[here, there])));
    assert!(is_local(&node));
    let _ = node.set("a", Some(service(&[there])));
    // Without the annotation, nodes without an endpoint drain, as after a change from Cluster.
    let plain = |endpoints| ServicePort { external_fallback: false, ..service(endpoints) };
    let _ = node.set("a", Some(plain(&[there])));
    assert!(is_local(&node));
    assert_eq!(node.frontend(A).drain_until, 2_000_001_000);
    // A Service without any endpoint has the same flags under any policy.
    let _ = node.set("a", Some(service(&[])));
    assert_eq!(node.frontend(A).flags & frontend::HAS_ENDPOINTS, 0);
}
