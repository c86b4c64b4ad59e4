//! Connections to a ClusterIP from a pod and from the node itself, to endpoints on this node and on
//! others.

use std::net::SocketAddr;

use traffic_policy_testing::matrix::PODS;

use crate::testbed::{Testbed, cluster_ip};
use traffic_policy_tests::caller::{Caller, Kind};

/// Sends requests from node-1 and from its pod until each pod has answered; returns how many of the
/// four combinations succeeded.
pub fn answered(testbed: &Testbed) -> usize {
    let node = testbed.cluster.lab.node(1);
    let ways = [node.netns(), node.pod(1).netns()]
        .map(|from| Caller::start(env!("CARGO_BIN_EXE_caller"), from, &testbed.cgroups[0]));
    let asks = ways.iter().flat_map(|caller| [Kind::V4, Kind::V6].map(|kind| (caller, kind)));
    asks.filter(|(caller, kind)| every_pod_answers(caller, *kind)).count()
}

fn every_pod_answers(caller: &Caller, kind: Kind) -> bool {
    let to = SocketAddr::new(cluster_ip(kind.family()), 80);
    let mut waiting = PODS.to_vec();
    // With 3 endpoints and a fair choice, one is missed once in 10^17 runs.
    for _ in 0..100 {
        match caller.ask(kind, to) {
            Ok((answer, _)) => waiting.retain(|pod| *pod != answer.pod),
            Err(error) => {
                println!("{kind:?} {to}: {error}");
                return false;
            }
        }
        if waiting.is_empty() {
            return true;
        }
    }
    println!("{kind:?} {to}: {waiting:?} never answered");
    false
}
