//! Nodes that do not answer connections of sockets: what is counted, and what the agent makes of
//! it.

use std::time::{Duration, Instant};
use std::{fs, io};

use aya::maps::{Array, HashMap, Map, MapData};
use nix::libc;
use serde_json::Value;
use traffic_policy_ebpf::abi::{NODE_NAME_LENGTH, NodeSilence};
use traffic_policy_testing::lab::{Family, Pod};
use traffic_policy_testing::nftables;
use traffic_policy_testing::object::{Backend, Port, Service, cluster_ip};
use traffic_policy_testing::pace;

use crate::fixture::{PORT, SocketCluster, service, service_at};
use traffic_policy_tests::caller::{Caller, Kind, Socket};

const PATIENCE: Duration = Duration::from_secs(30);

const SERVED: u8 = 10;
const SILENT: u8 = 11;
const REFUSING: u8 = 12;
const HERE: u8 = 13;

/// A Service whose endpoints have no server on the port.
fn refusing() -> Service {
    Service::new("refusing")
        .only_cluster_ip()
        .cluster_ip(cluster_ip(REFUSING, Family::V4))
        .cluster_ip(cluster_ip(REFUSING, Family::V6))
        .port(Port::tcp(PORT, 9))
}

/// Has a pod drop all that it is sent.
fn silence(pod: &Pod) {
    pod.netns().nft_drop_input(nftables::Family::Inet, "deaf").unwrap();
}

impl SocketCluster {
    fn map(&self, name: &str) -> MapData {
        let version = fs::read_dir(self.cluster.agents[0].pin_dir()).unwrap().next().unwrap().unwrap();
        MapData::from_pin(version.path().join("maps").join(name)).unwrap()
    }

    /// The signs that the first node has noted of another one.
    fn signs(&self, node: usize) -> NodeSilence {
        let names = Map::HashMap(self.map("tp_node_names"));
        let names: HashMap<_, u32, [u8; NODE_NAME_LENGTH]> = names.try_into().unwrap();
        let name = self.cluster.lab.node(node).name.as_bytes();
        let mut places = names.iter().map(Result::unwrap);
        let (place, _) = places.find(|(_, found)| found.starts_with(name)).unwrap();
        let signs: Array<_, NodeSilence> = Map::Array(self.map("tp_node_silence")).try_into().unwrap();
        signs.get(&place, 0).unwrap()
    }

    fn syns(&self, node: usize) -> u16 {
        self.signs(node).syns
    }

    /// Begins a connection that is not answered, until one is counted: a SYN within the jiffy of an
    /// answer is not.
    fn unanswered(&self, caller: &Caller, kind: Kind) -> Socket {
        pace::wait_for("a SYN that is counted", PATIENCE, || {
            let waiting = begin(caller, SILENT, kind);
            (self.syns(2) > 0).then_some(waiting)
        })
    }

    fn left_out(&self) -> Vec<String> {
        let body: Value = serde_json::from_str(&self.cluster.agents[0].healthz().unwrap().body).unwrap();
        let names = body["leftOut"].as_array().map_or(&[][..], Vec::as_slice);
        names.iter().map(|name| name.as_str().unwrap().to_owned()).collect()
    }

    fn suspicions(&self, result: &str) -> f64 {
        let metrics = self.cluster.agents[0].scrape().unwrap();
        metrics.value("traffic_policy_node_suspicions_total", &[("result", result)]).unwrap_or(0.0)
    }
}

/// Begins a connection to a Service, and does not wait for it.
fn begin(caller: &Caller, number: u8, kind: Kind) -> Socket {
    let socket = caller.tcp(kind);
    let begun = socket.begin(kind.written(service_at(number, kind)));
    assert_eq!(begun.unwrap_err().raw_os_error(), Some(libc::EINPROGRESS));
    socket
}

fn refused(caller: &Caller, kind: Kind) {
    let error = caller.tcp(kind).connect(kind.written(service_at(REFUSING, kind))).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused, "{error}");
}

#[test]
fn connections_that_nobody_has_answered_are_counted() {
    // More than are made, so that the agent neither asks nor sets a count to 0.
    let flags = ["--suspect-syns", "1000"];
    let fixture = SocketCluster::start_with(&[2, 2], &flags, |cluster| {
        let backend = |node, pod| [Backend::of(cluster.lab.node(node).pod(pod))];
        cluster.manifests.apply(&service(SERVED), &backend(2, 1)).unwrap();
        cluster.manifests.apply(&service(SILENT), &backend(2, 2)).unwrap();
        cluster.manifests.apply(&refusing(), &backend(2, 1)).unwrap();
        cluster.manifests.apply(&service(HERE), &backend(1, 2)).unwrap();
        silence(cluster.lab.node(2).pod(2));
        silence(cluster.lab.node(1).pod(2));
    });
    for caller in [fixture.in_pod(1, 1), fixture.on_node(1)] {
        for kind in Kind::ALL {
            let served = kind.written(service_at(SERVED, kind));
            let waiting = fixture.unanswered(&caller, kind);
            // Again after a second.
            let counted = fixture.syns(2);
            pace::until("a SYN that is sent again", PATIENCE, || fixture.syns(2) > counted);
            drop(waiting);
            let counted = fixture.syns(2);
            assert!(counted > 1, "{kind:?}: no answer ends a connection that is closed");

            drop(begin(&caller, HERE, kind));
            let datagrams = caller.udp(kind);
            datagrams.connect(served).unwrap();
            datagrams.send("who").unwrap();
            datagrams.receive().unwrap();
            assert_eq!(fixture.syns(2), counted, "{kind:?}: neither an endpoint here, nor UDP");

            drop(caller.ask(kind, service_at(SERVED, kind)).unwrap());
            assert_eq!(fixture.syns(2), 0, "{kind:?}: an answer");
            drop(fixture.unanswered(&caller, kind));
            refused(&caller, kind);
            assert_eq!(fixture.syns(2), 0, "{kind:?}: a reset");
            refused(&caller, kind);
            assert_eq!(fixture.syns(2), 0, "{kind:?}: refused from the beginning");
        }
        let socket = caller.mptcp(Kind::V4);
        drop(fixture.unanswered(&caller, Kind::V4));
        socket.connect(service_at(SERVED, Kind::V4)).unwrap();
        assert_eq!(fixture.syns(2), 0, "an answer by MPTCP");
    }
}

/// Two other nodes with an endpoint each, and callers on the first.
fn three_nodes() -> SocketCluster {
    SocketCluster::start(&[1, 1, 1], |cluster| {
        let backends = [2, 3].map(|node| Backend::of(cluster.lab.node(node).pod(1)));
        cluster.manifests.apply(&service(SERVED), &backends).unwrap();
        cluster.manifests.apply(&refusing(), &backends).unwrap();
    })
}

fn dies_and_returns(kind: Kind) {
    let fixture = three_nodes();
    let far = fixture.cluster.lab.node(3);
    let callers = [fixture.in_pod(1, 1), fixture.on_node(1)];
    let ask = || callers.each_ref().map(|caller| caller.ask(kind, service_at(SERVED, kind)).unwrap().0.pod);
    pace::until("the endpoint is used", PATIENCE, || ask().contains(&"pod-3-1".to_owned()));
    assert_eq!(fixture.signs(3).reported, 0, "nothing is suspected");

    fixture.cluster.lab.cut(far).unwrap();
    let start = Instant::now();
    let mut waiting = Vec::new();
    pace::until("left out", PATIENCE, || {
        waiting.extend(callers.each_ref().map(|caller| begin(caller, SERVED, kind)));
        fixture.left_out() == [far.name.clone()]
    });
    println!("{kind:?}: left out after {:?}, {} connections", start.elapsed(), waiting.len());
    // The kernel gives up the neighbour as well, but later.
    assert_ne!(fixture.signs(3).reported, 0, "it was not the sockets that noticed");
    // The agent says so just before it writes the maps; a connection to a dead endpoint fails.
    let elsewhere = |caller: &Caller| {
        caller.ask(kind, service_at(SERVED, kind)).is_ok_and(|(answer, _)| answer.pod == "pod-2-1")
    };
    pace::until("forty connections in a row go elsewhere", PATIENCE, || {
        (0..20).all(|_| callers.iter().all(elsewhere))
    });
    drop(waiting);

    fixture.cluster.lab.mend(far).unwrap();
    pace::until("back", PATIENCE, || fixture.left_out().is_empty());
    pace::until("used again", PATIENCE, || ask().contains(&"pod-3-1".to_owned()));
}

#[test]
fn a_node_that_dies_is_left_out_by_clients_of_its_own() {
    dies_and_returns(Kind::V4);
}

#[test]
fn and_in_ipv6() {
    dies_and_returns(Kind::V6);
}

/// The endpoint drops every SYN, or refuses all, and clients die with connections that wait: none
/// of these is the death of a node.
#[test]
fn a_node_that_lives_is_not_left_out() {
    let fixture = three_nodes();
    let caller = fixture.in_pod(1, 1);
    for _ in 0..50 {
        Kind::ALL.iter().for_each(|kind| refused(&caller, *kind));
    }
    for node in [2, 3] {
        assert_eq!(fixture.signs(node).reported, 0, "an endpoint that refuses is not suspected");
    }
    silence(fixture.cluster.lab.node(3).pod(1));
    for round in 0.. {
        assert!(round < 100, "nothing was suspected, so nothing is shown");
        let dying = fixture.in_pod(1, 1);
        let waiting: Vec<_> = (0..20).map(|_| begin(&dying, SERVED, Kind::ALL[round % 3])).collect();
        dying.kill(waiting);
        // Found alive twice: after the first time it could be suspected again.
        if fixture.suspicions("alive") > 1.5 {
            break;
        }
    }
    assert_eq!(fixture.left_out(), [""; 0], "{}", fixture.cluster.agents[0].log());
    assert!(fixture.suspicions("dead") < 0.5, "{}", fixture.cluster.agents[0].log());
}
