//! The cost of a system call with and without the programs.

use std::net::SocketAddr;

use traffic_policy_testing::cgroup::Cgroup;
use traffic_policy_testing::cluster::TARGET;
use traffic_policy_testing::object::Backend;

use crate::fixture::{SocketCluster, service, service_at};
use traffic_policy_tests::caller::{Caller, Kind, Socket};

/// The number of calls of a run, which mostly ends before the scheduler gives the CPU to another
/// task.
const CALLS: u32 = 3000;
const RUNS: usize = 100;
/// The same for connections, which take longer.
const CONNECTIONS: u32 = 100;

/// Times calls of a process outside and inside of the cgroups, in nanoseconds: without programs, to
/// a port of an endpoint of another node, and to a Service.
fn measure(
    fixture: &SocketCluster,
    port: u16,
    time: impl Fn(&Socket, SocketAddr) -> u64,
    judge: impl Fn(Kind, [u64; 3]),
) {
    let outside = Cgroup::create(&format!("{}-outside", fixture.cluster.lab.id())).unwrap();
    let namespace = fixture.cluster.lab.node(1).pod(1).netns();
    let (without, with) =
        (Caller::start(env!("CARGO_BIN_EXE_caller"), namespace, &outside), fixture.in_pod(1, 1));
    for kind in [Kind::V4, Kind::V6] {
        let endpoint = SocketAddr::new(fixture.pod_address(2, 1, kind.family()), port);
        let sockets = [
            (without.udp(kind), endpoint),
            (with.udp(kind), endpoint),
            (with.udp(kind), service_at(10, kind)),
        ];
        // In turns, with the best of many runs: others use the machine, too.
        let mut best = [u64::MAX; 3];
        for _ in 0..RUNS {
            for (best, (socket, to)) in best.iter_mut().zip(&sockets) {
                *best = (*best).min(time(socket, *to));
            }
        }
        judge(kind, best);
    }
}

/// Destinations other than Services must not become slower. `--nocapture` shows the figures.
#[test]
fn of_connect() {
    let fixture = SocketCluster::start(&[1, 1], |cluster| {
        cluster.manifests.apply(&service(10), &cluster.backends()).unwrap();
    });
    let time = |socket: &Socket, to| socket.time_connect(CALLS, to);
    measure(&fixture, 9, time, |kind, [bare, other, served]| {
        println!("{kind:?}: connect() {bare} ns without programs, {other} to others, {served} to a Service");
        assert!(other < bare + 200, "{kind:?}: {other} ns to others instead of {bare}");
        // The bound is a multiple of the call's own cost, as machines differ.
        assert!(served < 3 * bare, "{kind:?}: {served} ns to a Service instead of {bare}");
    });
}

/// A whole connection by TCP to an endpoint of another node: the programs on `connect` and the
/// callbacks together.
#[test]
fn of_connections() {
    let fixture = SocketCluster::start(&[1, 1], |cluster| {
        cluster.manifests.apply(&service(10), &[Backend::of(cluster.lab.node(2).pod(1))]).unwrap();
    });
    let time = |socket: &Socket, to| socket.time_connections(CONNECTIONS, to);
    measure(&fixture, TARGET, time, |kind, [bare, other, served]| {
        println!(
            "{kind:?}: a connection {bare} ns without programs, {other} to others, {served} to a Service"
        );
        // Bounds as above: a connection costs as much as dozens of calls.
        assert!(other < 2 * bare, "{kind:?}: {other} ns to others instead of {bare}");
        assert!(served < 2 * bare, "{kind:?}: {served} ns to a Service instead of {bare}");
    });
}
