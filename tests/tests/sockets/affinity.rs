//! `sessionAffinity: ClientIP` for callers without an address yet: one network namespace is one
//! client.

use std::time::Duration;

use serde_json::json;
use traffic_policy_testing::object::Service;

use crate::fixture::{SocketCluster, service, service_at, until};
use traffic_policy_tests::caller::{Caller, Kind};

fn sticky(seconds: u32) -> Service {
    service(10)
        .spec("sessionAffinity", json!("ClientIP"))
        .spec("sessionAffinityConfig", json!({"clientIP": {"timeoutSeconds": seconds}}))
}

fn pod(caller: &Caller, kind: Kind) -> String {
    caller.ask(kind, service_at(10, kind)).unwrap().0.pod
}

#[test]
fn a_namespace_stays_with_its_endpoint() {
    let fixture = SocketCluster::start(&[2, 2], |cluster| {
        cluster.manifests.apply(&sticky(600), &cluster.backends()).unwrap();
    });
    for kind in [Kind::V4, Kind::V6] {
        let to = service_at(10, kind);
        let (one, other) = (fixture.in_pod(1, 1), fixture.in_pod(1, 1));
        let first = pod(&one, kind);
        for _ in 0..15 {
            assert_eq!(pod(&one, kind), first, "{kind:?}");
            assert_eq!(pod(&other, kind), first, "{kind:?}: another process of the same pod");
        }
        // UDP is another port of the Service, with an endpoint of its own.
        let by_datagram = one.udp(kind).exchange(to).unwrap().1.pod;
        for _ in 0..15 {
            assert_eq!(one.udp(kind).exchange(to).unwrap().1.pod, by_datagram, "{kind:?}");
            let socket = other.udp(kind);
            socket.connect(to).unwrap();
            socket.send("who").unwrap();
            assert_eq!(socket.receive().unwrap().1.pod, by_datagram, "{kind:?}");
        }

        // The endpoint leaves: the client gets another, and keeps it when the first comes back.
        let backends = fixture.cluster.backends();
        let names: Vec<_> = fixture.cluster.lab.pods().map(|pod| pod.name.clone()).collect();
        let rest: Vec<_> = names
            .iter()
            .zip(&backends)
            .filter(|(name, _)| **name != first)
            .map(|(_, backend)| backend.clone())
            .collect();
        fixture.cluster.manifests.endpoints(&sticky(600), &rest).unwrap();
        let second = until("the client to leave an endpoint that is gone", || {
            let now = pod(&one, kind);
            (now != first).then_some(now)
        });
        fixture.cluster.manifests.endpoints(&sticky(600), &backends).unwrap();
        fixture.cluster.agents[0].wait_said(&["synced"], Duration::from_secs(5)).unwrap();
        for _ in 0..15 {
            assert_eq!(pod(&other, kind), second, "{kind:?}");
        }
    }
}

#[test]
fn another_namespace_is_another_client() {
    let fixture = SocketCluster::start(&[8, 8], |cluster| {
        cluster.manifests.apply(&sticky(600), &cluster.backends()).unwrap();
    });
    // By chance, eight clients all choose the same one of 16 once in 10^8 runs.
    let pods: Vec<_> = (1..=8).map(|number| pod(&fixture.in_pod(1, number), Kind::V4)).collect();
    assert!(pods.iter().any(|pod| *pod != pods[0]), "{pods:?}");
}

#[test]
fn it_ends_after_its_time() {
    let fixture = SocketCluster::start(&[4, 4], |cluster| {
        cluster.manifests.apply(&sticky(1), &cluster.backends()).unwrap();
    });
    let caller = fixture.on_node(1);
    let first = pod(&caller, Kind::V4);
    until("the client to leave its endpoint", || {
        std::thread::sleep(Duration::from_millis(1200));
        (pod(&caller, Kind::V4) != first).then_some(())
    });
}
