//! Cost of a system call with the programs in place, and without.

use std::net::SocketAddr;

use traffic_policy_testing::cgroup::Cgroup;

use crate::caller::{Caller, Kind};
use crate::fixture::{SocketCluster, service, service_at};

/// A run ends before the scheduler gives the CPU to another task, most of the time.
const CALLS: u32 = 3000;
const RUNS: usize = 100;

/// Other destinations than Services must not pay for them. `--nocapture` shows the figures.
#[test]
fn of_connect() {
    let fixture = SocketCluster::start(&[1, 1], |cluster| {
        cluster.manifests.apply(&service(10), &cluster.backends()).unwrap();
    });
    let outside = Cgroup::create(&format!("{}-outside", fixture.cluster.lab.id())).unwrap();
    let namespace = fixture.cluster.lab.node(1).pod(1).netns();
    let (without, with) = (Caller::start(namespace, &outside), fixture.in_pod(1, 1));
    for kind in [Kind::V4, Kind::V6] {
        let endpoint = SocketAddr::new(fixture.pod_address(2, 1, kind.family()), 9);
        let sockets = [
            (without.udp(kind), endpoint),
            (with.udp(kind), endpoint),
            (with.udp(kind), service_at(10, kind)),
        ];
        // In turns, and the best of many runs: others use the machine too.
        let mut best = [u64::MAX; 3];
        for _ in 0..RUNS {
            for (best, (socket, to)) in best.iter_mut().zip(&sockets) {
                *best = (*best).min(socket.time_connect(CALLS, *to));
            }
        }
        let [bare, other, served] = best;
        println!("{kind:?}: connect() {bare} ns without programs, {other} to others, {served} to a Service");
        assert!(other < bare + 200, "{kind:?}: {other} ns to others instead of {bare}");
        // In parts of what the call itself costs, as machines differ.
        assert!(served < 3 * bare, "{kind:?}: {served} ns to a Service instead of {bare}");
    }
}
