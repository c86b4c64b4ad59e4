//! Cluster IPs from pods and from nodes: the application sees the address that it used, the
//! endpoint sees the pod.

use std::collections::BTreeSet;
use std::net::SocketAddr;

use traffic_policy_testing::cluster::TARGET;
use traffic_policy_testing::lab::Family;
use traffic_policy_testing::object::{Policy, cluster_ip};

use crate::fixture::{SocketCluster, service, service_at};
use traffic_policy_tests::caller::{Caller, Kind};

/// The pods that answered by TCP, until there are as many as wanted.
fn pods_by_tcp(caller: &Caller, kind: Kind, to: SocketAddr, wanted: usize) -> BTreeSet<String> {
    let mut pods = BTreeSet::new();
    // With three endpoints, one is missed once in 10^17 runs.
    for _ in 0..100 {
        pods.insert(caller.ask(kind, to).unwrap().0.pod);
        if pods.len() == wanted {
            break;
        }
    }
    pods
}

#[test]
fn cluster_ips_of_policy_cluster_and_local() {
    let fixture = SocketCluster::start(&[2, 1], |cluster| {
        cluster.manifests.apply(&service(10), &cluster.backends()).unwrap();
        let local = service(11).internal_policy(Policy::Local);
        cluster.manifests.apply(&local, &cluster.backends()).unwrap();
    });
    let callers = [("pod", fixture.in_pod(1, 1)), ("node", fixture.on_node(1))];
    let mut connected = 0;
    for (who, caller) in &callers {
        for kind in Kind::ALL {
            let (what, to) = (format!("{who} {kind:?}"), service_at(10, kind));
            // The endpoint is another pod than the caller, so neither hairpin nor the node's own
            // address matters.
            let pods = pods_by_tcp(caller, kind, to, 3);
            assert_eq!(pods.len(), 3, "{what}");
            let (answer, socket) = loop {
                let (answer, socket) = caller.ask(kind, to).unwrap();
                if answer.pod == "pod-2-1" {
                    break (answer, socket);
                }
            };
            assert_eq!(socket.peer().unwrap(), kind.written(to), "{what}");
            let own = match *who {
                "pod" => fixture.pod_address(1, 1, kind.family()),
                _ => fixture.cluster.lab.node(1).address(kind.family()),
            };
            assert_eq!(answer.client.ip().to_canonical(), own, "{what}");
            connected = fixture.calls(1, "connected");
            let local = pods_by_tcp(caller, kind, service_at(11, kind), 2);
            assert_eq!(local, ["pod-1-1", "pod-1-2"].map(str::to_owned).into(), "{what}");
            for _ in 0..20 {
                assert_ne!(caller.ask(kind, service_at(11, kind)).unwrap().0.pod, "pod-2-1", "{what}");
            }
        }
    }
    assert!(fixture.calls(1, "connected") >= connected + 20);
    // None of their packets was translated.
    for hook in ["tc-ingress", "tc-egress"] {
        for outcome in ["forwarded", "delivered", "replied", "replied-local"] {
            assert_eq!(fixture.cluster.agents[0].packets(hook, outcome).unwrap(), 0, "{hook} {outcome}");
        }
    }
}

#[test]
fn datagrams() {
    let fixture = SocketCluster::start(&[1, 2], |cluster| {
        cluster.manifests.apply(&service(10), &cluster.backends()).unwrap();
        cluster.manifests.apply(&service(11), &cluster.backends()).unwrap();
    });
    datagrams_connected_and_not(&fixture);
    connected_sockets_that_name_the_address_again(&fixture);
    every_endpoint_gets_its_share_of_datagrams(&fixture);
}

fn datagrams_connected_and_not(fixture: &SocketCluster) {
    for caller in [fixture.in_pod(1, 1), fixture.on_node(1)] {
        for kind in Kind::ALL {
            let (first, second) = (kind.written(service_at(10, kind)), kind.written(service_at(11, kind)));
            let socket = caller.udp(kind);
            socket.connect(first).unwrap();
            assert_eq!(socket.peer().unwrap(), first);
            for _ in 0..3 {
                socket.send("hello").unwrap();
                let (from, answer) = socket.receive().unwrap();
                assert_eq!((from, answer.said.as_str()), (first, "hello"), "{kind:?}");
            }
            // Connected again, to another Service, and to none.
            socket.connect(second).unwrap();
            assert_eq!(socket.peer().unwrap(), second);
            socket.send("again").unwrap();
            assert_eq!(socket.receive().unwrap().0, second);
            socket.disconnect().unwrap();
            assert!(socket.peer().is_err());
            // A disconnected IPv6 socket receives from the address of its last peer only:
            // `__udp_disconnect` leaves sk_v6_daddr as it was.
            // <https://github.com/torvalds/linux/blob/v6.1/net/ipv4/udp.c>
            if kind != Kind::V6 {
                assert_eq!(socket.exchange(first).unwrap().0, first, "{kind:?}");
            }

            // Not connected: several conversations on one socket, each with its endpoint.
            let socket = caller.udp(kind);
            let pods = [first, second].map(|to| {
                let (from, answer) = socket.exchange(to).unwrap();
                assert_eq!(from, to, "{kind:?}");
                answer.pod
            });
            let before = fixture.calls(1, "connected");
            for _ in 0..20 {
                for (to, pod) in [first, second].into_iter().zip(&pods) {
                    let (from, answer) = socket.exchange(to).unwrap();
                    assert_eq!((from, &answer.pod), (to, pod), "{kind:?}: the endpoint changed");
                }
            }
            assert_eq!(fixture.calls(1, "connected"), before, "{kind:?}: chosen anew");
            // Datagrams in addition to a connection, perhaps to the same endpoint under another
            // address.
            for _ in 0..5 {
                let socket = caller.udp(kind);
                socket.connect(first).unwrap();
                socket.send_to("aside", second).unwrap();
                socket.send("straight").unwrap();
                assert_eq!(socket.receive().unwrap().0, first, "{kind:?}");
                assert_eq!(socket.peer().unwrap(), first, "{kind:?}");
            }
        }
    }
}

/// Some resolvers do this. The kernel lets a connected socket receive from its peer only.
fn connected_sockets_that_name_the_address_again(fixture: &SocketCluster) {
    let caller = fixture.in_pod(1, 1);
    for kind in Kind::ALL {
        let to = kind.written(service_at(10, kind));
        for _ in 0..10 {
            let socket = caller.udp(kind);
            socket.connect(to).unwrap();
            socket.send("who").unwrap();
            let pod = socket.receive().unwrap().1.pod;
            let before = fixture.calls(1, "connected");
            let (from, answer) = socket.exchange(to).unwrap();
            assert_eq!((from, answer.pod), (to, pod), "{kind:?}");
            assert_eq!(fixture.calls(1, "connected"), before, "{kind:?}: chosen anew");
        }
    }
}

fn every_endpoint_gets_its_share_of_datagrams(fixture: &SocketCluster) {
    let caller = fixture.in_pod(1, 1);
    for kind in Kind::ALL {
        let mut pods = BTreeSet::new();
        for _ in 0..100 {
            let socket = caller.udp(kind);
            pods.insert(socket.exchange(kind.written(service_at(10, kind))).unwrap().1.pod);
        }
        assert_eq!(pods.len(), 3, "{kind:?}: {pods:?}");
    }
}

#[test]
fn a_pod_reaches_itself() {
    let fixture = SocketCluster::start(&[1, 0], |cluster| {
        cluster.manifests.apply(&service(10), &cluster.backends()).unwrap();
    });
    let caller = fixture.in_pod(1, 1);
    for kind in Kind::ALL {
        let to = service_at(10, kind);
        let (answer, socket) = caller.ask(kind, to).unwrap();
        assert_eq!(answer.client.ip().to_canonical(), fixture.pod_address(1, 1, kind.family()));
        assert_eq!(socket.peer().unwrap(), kind.written(to));
        let socket = caller.udp(kind);
        assert_eq!(socket.exchange(kind.written(to)).unwrap().0, kind.written(to));
    }
}

/// The subflows of MPTCP are TCP. getpeername() is called on the socket above them, which has a
/// cookie of its own that the programs do not learn when the subflow connects: it shows the
/// endpoint.
#[test]
fn multipath_tcp() {
    let fixture = SocketCluster::start(&[1, 1], |cluster| {
        cluster.manifests.apply(&service(10), &cluster.backends()).unwrap();
    });
    let caller = fixture.in_pod(1, 1);
    for kind in Kind::ALL {
        let socket = caller.mptcp(kind);
        socket.connect(kind.written(service_at(10, kind))).unwrap();
        let answer = socket.line("who").unwrap();
        let node = if answer.pod == "pod-1-1" { 1 } else { 2 };
        let endpoint = SocketAddr::new(fixture.pod_address(node, 1, kind.family()), TARGET);
        assert_eq!(socket.peer().unwrap(), kind.written(endpoint), "{kind:?}");
    }
}

#[test]
fn other_cgroups_are_left_alone() {
    let fixture = SocketCluster::start_on_all(&[1, 0], |cluster| {
        cluster.manifests.apply(&service(10), &cluster.backends()).unwrap();
    });
    // A process in the pod's network and in another node's cgroup.
    let pod = fixture.cluster.lab.node(1).pod(1);
    let caller = Caller::start(env!("CARGO_BIN_EXE_caller"), pod.netns(), &fixture.cgroups(2).node);
    let to = SocketAddr::new(cluster_ip(10, Family::V4), 80);
    let before = fixture.calls(1, "connected");
    // Its packets lead nowhere: the pod's node handles only those from outside.
    caller.ask(Kind::V4, to).ok();
    assert_eq!(fixture.calls(1, "connected"), before);
}
