//! Calls that lead nowhere fail at once, with the error that the application would have got from
//! netfilter.

use std::net::SocketAddr;

use nix::libc;
use traffic_policy_testing::object::{Policy, cluster_ip};

use crate::fixture::{PORT, SocketCluster, error_at_once, service, service_at};
use traffic_policy_tests::caller::{Caller, Kind};

/// The errors of connect() by TCP, of connect() by UDP, and of sendto().
fn errors(caller: &Caller, kind: Kind, to: SocketAddr) -> [i32; 3] {
    let to = kind.written(to);
    [
        error_at_once(|| caller.tcp(kind).connect(to)),
        error_at_once(|| caller.udp(kind).connect(to)),
        error_at_once(|| caller.udp(kind).send_to("hello", to)),
    ]
}

const REFUSED: [i32; 3] = [libc::ECONNREFUSED; 3];
const DROPPED: [i32; 3] = [libc::ETIMEDOUT, libc::EPERM, libc::EPERM];

#[test]
fn each_reason_has_its_error() {
    let fixture = SocketCluster::start(&[1, 1], |cluster| {
        let remote = traffic_policy_testing::object::Backend::of(cluster.lab.node(2).pod(1));
        cluster.manifests.apply(&service(10), &[]).unwrap();
        cluster.manifests.apply(&service(11), &cluster.backends()).unwrap();
        let local = |number| service(number).internal_policy(Policy::Local);
        cluster.manifests.apply(&local(12), std::slice::from_ref(&remote)).unwrap();
        cluster.manifests.apply(&local(13), &[]).unwrap();
        cluster.manifests.apply(&service(14), &[remote.not_ready()]).unwrap();
    });
    for (who, caller) in [("pod", fixture.in_pod(1, 1)), ("node", fixture.on_node(1))] {
        for kind in Kind::ALL {
            let at = |number, port| SocketAddr::new(cluster_ip(number, kind.family()), port);
            for (to, wanted, outcome) in [
                (service_at(10, kind), REFUSED, "rejected-no-endpoint"),
                // Policy Local makes no difference where there is no endpoint at all.
                (service_at(13, kind), REFUSED, "rejected-no-endpoint"),
                (service_at(14, kind), REFUSED, "rejected-no-endpoint"),
                (at(11, PORT + 1), REFUSED, "rejected-unknown-port"),
                (service_at(12, kind), DROPPED, "dropped-no-local-endpoint"),
                (at(99, PORT), DROPPED, "dropped-unallocated-cluster-ip"),
            ] {
                let before = fixture.calls(1, outcome);
                assert_eq!(errors(&caller, kind, to), wanted, "{who} {kind:?} {to}");
                assert_eq!(fixture.calls(1, outcome), before + 3, "{who} {kind:?} {to}");
            }
            caller.ask(kind, service_at(11, kind)).unwrap();
        }
    }
}
