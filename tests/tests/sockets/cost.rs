//! What a call costs with the programs in place, and without.

use crate::caller::{Caller, Kind};
use crate::stand::{Stand, service, service_at};

use std::net::{IpAddr, SocketAddr};

use traffic_policy_tests::cgroup::Cgroup;

const CALLS: u32 = 100_000;

/// Nanoseconds of a connect() by UDP: the best of several runs, for others use the machine too.
fn time(caller: &Caller, kind: Kind, to: SocketAddr) -> u64 {
    (0..7).map(|_| caller.udp(kind).time_connect(CALLS, to)).min().unwrap()
}

/// Other destinations than Services must not pay for them. `--nocapture` shows the figures.
#[test]
fn of_connect() {
    let stand = Stand::start(&[1, 1], |cluster| {
        cluster.manifests.apply(&service(10), &cluster.backends()).unwrap();
    });
    let outside = Cgroup::create(&format!("{}-outside", stand.cluster.lab.id())).unwrap();
    let namespace = stand.cluster.lab.node(1).pod(1).netns();
    let (without, with) = (Caller::start(namespace, &outside), stand.in_pod(1, 1));
    for kind in [Kind::V4, Kind::V6] {
        let endpoint = |caller: &Caller| {
            let to: IpAddr = stand.pod_address(2, 1, kind.family());
            time(caller, kind, SocketAddr::new(to, 9))
        };
        let (bare, other) = (endpoint(&without), endpoint(&with));
        let served = time(&with, kind, service_at(10, kind));
        println!("{kind:?}: connect() {bare} ns without programs, {other} to others, {served} to a Service");
        assert!(other < bare + 400, "{kind:?}: {other} ns instead of {bare}");
        assert!(served < bare + 3000, "{kind:?}: {served} ns instead of {bare}");
    }
    drop((without, with));
}
