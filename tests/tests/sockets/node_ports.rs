//! Node ports, load balancers' addresses and external IPs from inside: the external policy does not
//! apply to such callers.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use nix::libc;
use traffic_policy_testing::cluster::Cluster;
use traffic_policy_testing::lab::Family;
use traffic_policy_testing::object::{Policy, cluster_ip, vip};
use traffic_policy_testing::traffic::Server;

use crate::fixture::{NODE_PORT, PORT, SocketCluster};
use traffic_policy_tests::caller::Kind;

const OTHER_PORT: u16 = 30081;

fn external_ip(family: Family) -> IpAddr {
    match family {
        Family::V4 => [203, 0, 113, 10].into(),
        Family::V6 => [0x2001, 0xdb8, 0xf, 0, 0, 0, 0, 10].into(),
    }
}

/// Policy Local: `far` has its only endpoint on node-2, `near` its only one on node-1.
fn prepare(cluster: &Cluster) {
    let far = Cluster::node_port("far", Policy::Local, NODE_PORT).announced().cluster_ips(10);
    let far = Family::BOTH.iter().fold(far, |far, family| far.external_ip(external_ip(*family)));
    let backend =
        |node: usize, pod| traffic_policy_testing::object::Backend::of(cluster.lab.node(node).pod(pod));
    cluster.manifests.apply(&far, &[backend(2, 1)]).unwrap();
    let near = Cluster::node_port("near", Policy::Local, OTHER_PORT);
    cluster.manifests.apply(&near, &[backend(1, 2)]).unwrap();
}

/// Every address by which the caller's own node offers `far`, of which it has no endpoint.
fn own_ways(fixture: &SocketCluster, family: Family) -> Vec<SocketAddr> {
    vec![
        fixture.cluster.at(1, family, NODE_PORT),
        SocketAddr::new(vip(family), PORT),
        SocketAddr::new(external_ip(family), PORT),
        SocketAddr::new(cluster_ip(10, family), PORT),
    ]
}

fn policy_local_without_an_endpoint_here(fixture: &SocketCluster) {
    for (caller, own) in [
        (fixture.in_pod(1, 1), fixture.cluster.lab.node(1).pod(1).addresses),
        (fixture.on_node(1), fixture.cluster.lab.node(1).addresses),
    ] {
        for kind in Kind::ALL {
            for to in own_ways(fixture, kind.family()) {
                let what = format!("{own} {kind:?} {to}");
                let (answer, socket) = caller.ask(kind, to).unwrap_or_else(|error| panic!("{what}: {error}"));
                assert_eq!(answer.pod, "pod-2-1", "{what}");
                assert_eq!(answer.client.ip().to_canonical(), own.of(kind.family()), "{what}");
                assert_eq!(socket.peer().unwrap(), kind.written(to), "{what}");
                let socket = caller.udp(kind);
                let (from, answer) = socket.exchange(kind.written(to)).unwrap();
                assert_eq!((from, answer.pod.as_str()), (kind.written(to), "pod-2-1"), "{what}");
            }
        }
    }
}

#[test]
fn of_the_callers_own_node_and_of_loopback_addresses() {
    let fixture = SocketCluster::start(&[2, 1], prepare);
    policy_local_without_an_endpoint_here(&fixture);
    loopback_of_the_node(&fixture);
    loopback_of_a_pod_is_its_own(&fixture);
}

/// The policy of that node applies: the caller is an external client there.
#[test]
fn policy_local_on_another_node() {
    let fixture = SocketCluster::start_on_all(&[2, 1], prepare);
    for (caller, own) in [
        (fixture.in_pod(1, 1), fixture.cluster.lab.node(1).pod(1).addresses),
        (fixture.on_node(1), fixture.cluster.lab.node(1).addresses),
    ] {
        let before = fixture.calls(1, "connected");
        for kind in Kind::ALL {
            let family = kind.family();
            let (answer, _) = caller.ask(kind, fixture.cluster.at(2, family, NODE_PORT)).unwrap();
            assert_eq!(answer.pod, "pod-2-1", "{own} {kind:?}");
            assert_eq!(answer.client.ip().to_canonical(), own.of(family), "{own} {kind:?}: not its address");
            // `near` has no endpoint there: no answer, until the caller's time limit.
            let error = caller.ask(kind, fixture.cluster.at(2, family, OTHER_PORT)).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(libc::EINPROGRESS), "{own} {kind:?}: {error}");
        }
        assert_eq!(
            fixture.calls(1, "connected"),
            before,
            "{own}: another node's addresses are not this one's"
        );
    }
    assert!(fixture.cluster.agents[1].packets("tc-ingress", "dropped-no-local-endpoint").unwrap() >= 6);
}

/// A call like `curl localhost:30080`.
fn loopback_of_the_node(fixture: &SocketCluster) {
    let caller = fixture.on_node(1);
    for (kind, ip) in [
        (Kind::V4, "127.0.0.1"),
        (Kind::V4, "127.9.8.7"),
        (Kind::V4, "0.0.0.0"),
        (Kind::V6, "::1"),
        (Kind::V6, "::"),
        (Kind::Mapped, "127.0.0.1"),
    ] {
        let to = SocketAddr::new(ip.parse().unwrap(), NODE_PORT);
        let (answer, socket) = caller.ask(kind, to).unwrap_or_else(|error| panic!("{kind:?} {to}: {error}"));
        assert_eq!(answer.pod, "pod-2-1", "{kind:?} {to}");
        assert_eq!(socket.peer().unwrap(), kind.written(to));
        let socket = caller.udp(kind);
        socket.connect(kind.written(to)).unwrap();
        socket.send("hello").unwrap();
        assert_eq!(socket.receive().unwrap().1.pod, "pod-2-1", "{kind:?} {to}");
        let socket = caller.udp(kind);
        assert_eq!(socket.exchange(kind.written(to)).unwrap().1.pod, "pod-2-1", "{kind:?} {to}");
        // A port that is not a node port stays the node's own.
        let error = caller.ask(kind, SocketAddr::new(to.ip(), 30099)).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ECONNREFUSED), "{kind:?} {to}: {error}");
    }
}

fn loopback_of_a_pod_is_its_own(fixture: &SocketCluster) {
    let caller = fixture.in_pod(1, 1);
    let before = fixture.calls(1, "connected");
    let own = [
        (Kind::V4, IpAddr::from([127, 0, 0, 1])),
        (Kind::V6, Ipv6Addr::LOCALHOST.into()),
        (Kind::V4, IpAddr::from([0; 4])),
    ];
    for (kind, ip) in own {
        let error = caller.ask(kind, SocketAddr::new(ip, NODE_PORT)).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ECONNREFUSED), "{ip}: {error}");
    }
    let pod = fixture.cluster.lab.node(1).pod(1);
    let _server = Server::start(pod, NODE_PORT, &fixture.cluster.ledger).unwrap();
    for (kind, ip) in own {
        let (answer, _) = caller.ask(kind, SocketAddr::new(ip, NODE_PORT)).unwrap();
        assert_eq!(answer.pod, "pod-1-1", "{ip}");
        let socket = caller.udp(kind);
        assert_eq!(socket.exchange(SocketAddr::new(ip, NODE_PORT)).unwrap().1.pod, "pod-1-1", "{ip}");
    }
    assert_eq!(fixture.calls(1, "connected"), before);
}
