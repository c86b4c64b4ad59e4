//! An endpoint is removed while sockets use it.

use std::thread::sleep;
use std::time::Duration;

use nix::libc;
use traffic_policy_testing::object::{Backend, Policy};

use crate::fixture::{SocketCluster, service, service_at, until};
use traffic_policy_tests::caller::{Caller, Kind, Socket};

/// The Service whose endpoints change.
const NUMBER: u8 = 10;
/// A Service that has both endpoints all the time.
const OTHER: u8 = 11;

/// Two endpoints, on the caller's node and on the other one.
fn fixture() -> SocketCluster {
    SocketCluster::start(&[2, 1], |cluster| {
        let backends = [(1, 2), (2, 1)].map(|(node, pod)| Backend::of(cluster.lab.node(node).pod(pod)));
        for number in [NUMBER, OTHER] {
            cluster.manifests.apply(&service(number), &backends).unwrap();
        }
    })
}

fn one_endpoint(fixture: &SocketCluster, pod: &str) -> Backend {
    if pod == "pod-2-1" { fixture.backend(2, 1) } else { fixture.backend(1, 2) }
}

fn other(pod: &str) -> &'static str {
    if pod == "pod-2-1" { "pod-1-2" } else { "pod-2-1" }
}

/// A UDP socket connected to a Service, whose endpoint is this pod.
fn connected_to(caller: &Caller, number: u8, kind: Kind, pod: &str) -> Socket {
    loop {
        let socket = caller.udp(kind);
        socket.connect(kind.written(service_at(number, kind))).unwrap();
        socket.send("who").unwrap();
        if socket.receive().unwrap().1.pod == pod {
            return socket;
        }
    }
}

#[test]
fn connected_udp_sockets_get_an_error_and_connect_again() {
    let fixture = fixture();
    let callers = [fixture.in_pod(1, 1), fixture.on_node(1)];
    let both = [fixture.backend(1, 2), fixture.backend(2, 1)];
    for gone in ["pod-2-1", "pod-1-2"] {
        let sockets: Vec<_> = callers
            .iter()
            .flat_map(|caller| Kind::ALL.map(|kind| (kind, connected_to(caller, NUMBER, kind, gone))))
            .collect();
        let staying: Vec<_> = Kind::ALL
            .iter()
            .flat_map(|kind| [(NUMBER, other(gone)), (OTHER, gone)].map(|(number, pod)| (*kind, number, pod)))
            .map(|(kind, number, pod)| (connected_to(&callers[0], number, kind, pod), pod))
            .collect();
        fixture
            .cluster
            .manifests
            .endpoints(&service(NUMBER), &[one_endpoint(&fixture, other(gone))])
            .unwrap();
        fixture.cluster.agents[0]
            .wait_said(&["ended UDP sockets", "sockets=6"], Duration::from_secs(10))
            .unwrap();
        for (kind, socket) in &sockets {
            let to = kind.written(service_at(NUMBER, *kind));
            // A receiver gets an error; a sender learns that nothing is there.
            let error = socket.receive().unwrap_err();
            assert_eq!(error.raw_os_error(), Some(libc::ECONNABORTED), "{kind:?}: {error}");
            let error = socket.send("who").unwrap_err();
            assert_eq!(error.raw_os_error(), Some(libc::EDESTADDRREQ), "{kind:?}: {error}");
            socket.connect(to).unwrap();
            socket.send("who").unwrap();
            let (from, answer) = socket.receive().unwrap();
            assert_eq!((from, answer.pod.as_str()), (to, other(gone)), "{kind:?}");
        }
        for (socket, pod) in &staying {
            socket.send("who").unwrap();
            assert_eq!(&socket.receive().unwrap().1.pod, pod);
        }
        fixture.cluster.manifests.endpoints(&service(NUMBER), &both).unwrap();
        // Until both are chosen again.
        for kind in Kind::ALL {
            until("the endpoint to come back", || {
                (callers[0].ask(kind, service_at(NUMBER, kind)).unwrap().0.pod == gone).then_some(())
            });
        }
    }
}

#[test]
fn an_endpoint_that_went_while_no_agent_ran() {
    let mut fixture = fixture();
    let caller = fixture.on_node(1);
    let sockets = Kind::ALL.map(|kind| connected_to(&caller, NUMBER, kind, "pod-2-1"));
    let staying = connected_to(&caller, NUMBER, Kind::V4, "pod-1-2");
    fixture.cluster.agents[0].kill().unwrap();
    fixture.cluster.manifests.endpoints(&service(NUMBER), &[one_endpoint(&fixture, "pod-1-2")]).unwrap();
    // The programs have not been informed.
    sockets[0].send("who").unwrap();
    assert_eq!(sockets[0].receive().unwrap().1.pod, "pod-2-1");
    fixture.cluster.agents[0].start_again().unwrap();
    fixture.cluster.agents[0]
        .wait_said(&["ended UDP sockets", "sockets=3"], Duration::from_secs(20))
        .unwrap();
    for socket in &sockets {
        assert_eq!(socket.receive().unwrap_err().raw_os_error(), Some(libc::ECONNABORTED));
    }
    staying.send("who").unwrap();
    assert_eq!(staying.receive().unwrap().1.pod, "pod-1-2");

    // The Service is deleted.
    fixture.cluster.agents[0].wait_ready(Duration::from_secs(20)).unwrap();
    fixture.cluster.manifests.delete(&service(NUMBER)).unwrap();
    let error = staying.receive().unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::ECONNABORTED), "{error}");
    let error = staying.connect(service_at(NUMBER, Kind::V4)).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EPERM), "{error}");
}

/// The table of sockets holds 65,536; a socket that only ever sends is never looked up.
#[test]
fn a_socket_is_not_forgotten_for_many_others() {
    let fixture = fixture();
    fixture.cluster.manifests.endpoints(&service(NUMBER), &[one_endpoint(&fixture, "pod-2-1")]).unwrap();
    fixture.cluster.agents[0].wait_said(&["synced"], Duration::from_secs(5)).unwrap();
    let caller = fixture.in_pod(1, 1);
    let old = caller.udp(Kind::V4);
    old.connect(service_at(NUMBER, Kind::V4)).unwrap();
    caller.udp(Kind::V4).churn(200_000, service_at(NUMBER, Kind::V4));
    old.send("still").unwrap();
    fixture.cluster.manifests.endpoints(&service(NUMBER), &[one_endpoint(&fixture, "pod-1-2")]).unwrap();
    fixture.cluster.agents[0]
        .wait_said(&["ended UDP sockets", "sockets=1"], Duration::from_secs(10))
        .unwrap();
    assert_eq!(old.send("again").unwrap_err().raw_os_error(), Some(libc::EDESTADDRREQ));
}

/// A conversation stays with its endpoint while that serves; endpoint lists and policies apply to
/// new ones.
#[test]
fn datagrams_stay_with_an_endpoint_that_serves() {
    let fixture = fixture();
    let caller = fixture.in_pod(1, 1);
    for kind in Kind::ALL {
        let to = kind.written(service_at(NUMBER, kind));
        let socket = loop {
            let socket = caller.udp(kind);
            if socket.exchange(to).unwrap().1.pod == "pod-2-1" {
                break socket;
            }
        };
        let stays = || {
            for _ in 0..5 {
                let (from, answer) = socket.exchange(to).unwrap();
                assert_eq!((from, answer.pod.as_str()), (to, "pod-2-1"), "{kind:?}");
            }
        };
        // The only endpoint that new conversations get, so often that chance hardly explains it.
        let new_ones_go_elsewhere = || {
            let mut in_a_row = 0;
            until("new conversations to go elsewhere", || {
                let elsewhere = caller.udp(kind).exchange(to).unwrap().1.pod == "pod-1-2";
                in_a_row = if elsewhere { in_a_row + 1 } else { 0 };
                (in_a_row == 20).then_some(())
            });
        };
        let terminating = [fixture.backend(1, 2), fixture.backend(2, 1).terminating()];
        fixture.cluster.manifests.endpoints(&service(NUMBER), &terminating).unwrap();
        new_ones_go_elsewhere();
        stays();
        let both = [fixture.backend(1, 2), fixture.backend(2, 1)];
        fixture.cluster.manifests.apply(&service(NUMBER).internal_policy(Policy::Local), &both).unwrap();
        new_ones_go_elsewhere();
        stays();
        fixture.cluster.manifests.apply(&service(NUMBER), &both).unwrap();
        until("the endpoint to come back", || {
            (caller.udp(kind).exchange(to).unwrap().1.pod == "pod-2-1").then_some(())
        });
        stays();
    }
}

/// The endpoint is recorded as removed only until the next sweep.
#[test]
fn datagrams_leave_an_endpoint_that_went_long_ago() {
    let fixture = fixture();
    let caller = fixture.in_pod(1, 1);
    let sockets = Kind::ALL.map(|kind| {
        let to = kind.written(service_at(NUMBER, kind));
        let sockets: Vec<_> = (0..10).map(|_| caller.udp(kind)).collect();
        sockets.iter().for_each(|socket| drop(socket.exchange(to).unwrap()));
        (to, sockets)
    });
    fixture.cluster.manifests.endpoints(&service(NUMBER), &[one_endpoint(&fixture, "pod-1-2")]).unwrap();
    for (to, _) in &sockets {
        let mut in_a_row = 0;
        until("new conversations to go elsewhere", || {
            let kind = if to.is_ipv4() { Kind::V4 } else { Kind::Mapped };
            let elsewhere = caller.udp(kind).exchange(*to).unwrap().1.pod == "pod-1-2";
            in_a_row = if elsewhere { in_a_row + 1 } else { 0 };
            (in_a_row == 20).then_some(())
        });
    }
    // Two sweeps, two seconds apart.
    sleep(Duration::from_secs(5));
    for (to, sockets) in &sockets {
        for socket in sockets {
            assert_eq!(socket.exchange(*to).unwrap().1.pod, "pod-1-2", "{to}");
        }
    }
}

#[test]
fn datagrams_move_and_connections_stay() {
    let fixture = fixture();
    let caller = fixture.in_pod(1, 1);
    for kind in Kind::ALL {
        let to = kind.written(service_at(NUMBER, kind));
        let (answer, connection) = caller.ask(kind, service_at(NUMBER, kind)).unwrap();
        let gone = answer.pod;
        let socket = loop {
            let socket = caller.udp(kind);
            if socket.exchange(to).unwrap().1.pod == gone {
                break socket;
            }
        };
        fixture
            .cluster
            .manifests
            .endpoints(&service(NUMBER), &[one_endpoint(&fixture, other(&gone))])
            .unwrap();
        let before = fixture.calls(1, "connected");
        until("the datagrams to move", || {
            let (from, answer) = socket.exchange(to).unwrap();
            assert_eq!(from, to, "{kind:?}");
            (answer.pod != gone).then_some(())
        });
        // It moved once, and stays there when the first endpoint comes back.
        fixture
            .cluster
            .manifests
            .endpoints(&service(NUMBER), &[fixture.backend(1, 2), fixture.backend(2, 1)])
            .unwrap();
        until("the endpoint to come back", || {
            let (answer, _) = caller.ask(kind, service_at(NUMBER, kind)).unwrap();
            assert_eq!(socket.exchange(to).unwrap().1.pod, other(&gone), "{kind:?}");
            (answer.pod == gone).then_some(())
        });
        assert!(fixture.calls(1, "connected") > before);
        assert_eq!(connection.line("still").unwrap().pod, gone, "{kind:?}");
        assert_eq!(connection.peer().unwrap(), to, "{kind:?}");
    }
}
