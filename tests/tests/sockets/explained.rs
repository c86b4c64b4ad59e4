//! `explain` for pods and processes of the node, compared with the results of their sockets: each
//! address of a Service, for each pair of policies, with endpoints nowhere, on this node, elsewhere
//! and on both nodes.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use nix::libc;
use traffic_policy_testing::cluster::{Cluster, TARGET};
use traffic_policy_testing::counters::Counters;
use traffic_policy_testing::explain::{self, Answer, Flow};
use traffic_policy_testing::lab::Family;
use traffic_policy_testing::object::{Policy, Service, cluster_ip};
use traffic_policy_testing::traffic;

use crate::fixture::{NODE_PORT, PORT, SocketCluster};
use traffic_policy_tests::caller::{Caller, Kind};

/// Pods that are the endpoints: node, pod.
const PLACES: [(&str, &[(usize, usize)]); 4] =
    [("nowhere", &[]), ("here", &[(1, 2)]), ("elsewhere", &[(2, 1)]), ("both", &[(1, 1), (1, 2), (2, 1)])];
const POLICIES: [Policy; 2] = [Policy::Cluster, Policy::Local];
const SERVICES: u8 = 16;

/// Destinations by which a Service is reached from node-1.
const WAYS: [&str; 8] = [
    "cluster IP",
    "unknown port",
    "unallocated",
    "own node port",
    "load balancer",
    "external IP",
    "loopback",
    "other node's port",
];

fn announced(network: u8, number: u8, family: Family) -> IpAddr {
    match family {
        Family::V4 => [203, 0, 113, network * 100 + number].into(),
        Family::V6 => [0x2001, 0xdb8, 0xf, network.into(), 0, 0, 0, number.into()].into(),
    }
}

fn service(number: u8) -> Service {
    let policy = |bit: u8| POLICIES[usize::from(((number / 4) >> bit) & 1)];
    let port = NODE_PORT + u16::from(number);
    let mut service = Cluster::node_port(&format!("s{number}"), policy(0), port).internal_policy(policy(1));
    for family in Family::BOTH {
        service = service
            .cluster_ip(cluster_ip(number + 1, family))
            .vip(announced(0, number, family))
            .external_ip(announced(1, number, family));
    }
    service
}

fn fixture() -> SocketCluster {
    SocketCluster::start_on_all(&[2, 1], |cluster| {
        for number in 0..SERVICES {
            let (_, endpoints) = PLACES[usize::from(number % 4)];
            let pods = endpoints.iter().map(|(node, pod)| cluster.lab.node(*node).pod(*pod));
            let backends: Vec<_> = pods.map(traffic_policy_testing::object::Backend::of).collect();
            cluster.manifests.apply(&service(number), &backends).unwrap();
        }
    })
}

fn destination(fixture: &SocketCluster, way: &str, number: u8, family: Family) -> SocketAddr {
    let node_port = NODE_PORT + u16::from(number);
    match way {
        "cluster IP" => SocketAddr::new(cluster_ip(number + 1, family), PORT),
        "unknown port" => SocketAddr::new(cluster_ip(number + 1, family), PORT + 1),
        "unallocated" => SocketAddr::new(cluster_ip(number + 100, family), PORT),
        "own node port" => fixture.cluster.at(1, family, node_port),
        "load balancer" => SocketAddr::new(announced(0, number, family), PORT),
        "external IP" => SocketAddr::new(announced(1, number, family), PORT),
        "loopback" if family == Family::V4 => SocketAddr::new([127, 0, 0, 1].into(), node_port),
        "loopback" => SocketAddr::new(Ipv6Addr::LOCALHOST.into(), node_port),
        _ => fixture.cluster.at(2, family, node_port),
    }
}

/// A call that leads to a Service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Call {
    Tcp,
    ConnectedUdp,
    Udp,
}

/// The result of a call: the answer, and the peer as the application sees it; or the error.
type Met = io::Result<(traffic::Answer, SocketAddr)>;

fn meet(caller: &Caller, kind: Kind, call: Call, to: SocketAddr) -> Met {
    let to = kind.written(to);
    match call {
        Call::Tcp => {
            let socket = caller.tcp(kind);
            socket.connect(to)?;
            let answer = socket.line("who")?;
            Ok((answer, socket.peer()?))
        }
        Call::ConnectedUdp => {
            let socket = caller.udp(kind);
            socket.connect(to)?;
            socket.send("who")?;
            let (from, answer) = socket.receive()?;
            assert_eq!(from, socket.peer()?, "{kind:?} {to}");
            Ok((answer, from))
        }
        Call::Udp => caller.udp(kind).exchange(to).map(|(from, answer)| (answer, from)),
    }
}

struct Case<'a> {
    fixture: &'a SocketCluster,
    counters: &'a Counters,
    caller: &'a Caller,
    kind: Kind,
    call: Call,
    to: SocketAddr,
}

impl Case<'_> {
    /// Compares the result with the answer of `explain`.
    fn judge(&self, answer: &Answer) -> Result<(), String> {
        let counted = || self.counters.get("socket", &answer.outcome).unwrap();
        let before = counted();
        let met = meet(self.caller, self.kind, self.call, self.to);
        let moved = counted() - before;
        if answer.verdict == "endpoints" {
            let (met, peer) = met.map_err(|error| error.to_string())?;
            if moved == 0 {
                return Err(format!("{} is not counted", answer.outcome));
            }
            return self.judge_endpoint(answer, &met, peer);
        }
        let error = met.map(drop).map_err(|error| error.raw_os_error().unwrap_or_default());
        let wanted = match (answer.verdict.as_str(), self.call) {
            ("reject", _) => libc::ECONNREFUSED,
            ("drop", Call::Tcp) => libc::ETIMEDOUT,
            ("drop", _) => libc::EPERM,
            // The pod's own loopback, where nothing listens; an unconnected socket does not get
            // that error.
            ("unhandled", Call::Udp) => libc::EAGAIN,
            ("unhandled", _) => libc::ECONNREFUSED,
            (verdict, _) => return Err(format!("verdict {verdict}")),
        };
        if error != Err(wanted) {
            return Err(format!("error {error:?}, not {wanted}"));
        }
        if moved != 1 && answer.verdict != "unhandled" {
            return Err(format!("{} moved by {moved}", answer.outcome));
        }
        Ok(())
    }

    fn judge_endpoint(&self, answer: &Answer, met: &traffic::Answer, peer: SocketAddr) -> Result<(), String> {
        let family = self.kind.family();
        let pod = self.fixture.cluster.lab.pods().find(|pod| pod.name == met.pod).unwrap();
        let endpoint = SocketAddr::new(pod.address(family), TARGET);
        if !answer.candidates.contains(&endpoint) {
            return Err(format!("{endpoint} is none of {:?}", answer.candidates));
        }
        if peer != self.kind.written(self.to) {
            return Err(format!("the peer is {peer}"));
        }
        // `explain` answers for an endpoint of its own choice; only the pod itself as endpoint
        // makes a difference.
        let source = answer.source.unwrap().ip();
        let seen = met.client.ip().to_canonical();
        let on_node = self.fixture.cluster.lab.node(1);
        let from_node = source == on_node.address(family) || answer.masquerade;
        let own_gateway = met.node == on_node.name && from_node;
        if seen != source && !own_gateway {
            return Err(format!("seen as {seen}, not {source}"));
        }
        Ok(())
    }
}

fn flow(source: IpAddr, to: SocketAddr, call: Call, from: &'static str, name: String) -> Flow {
    let protocol = if call == Call::Tcp { "TCP" } else { "UDP" };
    Flow { name, ..Flow::new(protocol, SocketAddr::new(source, 41_000), to).from(from) }
}

#[test]
fn of_this_node() {
    let fixture = fixture();
    let callers = [("pod", fixture.in_pod(1, 1)), ("node", fixture.on_node(1))];
    let counters = Counters::of(&fixture.cluster.agents[0]).unwrap();
    let mut flows = Vec::new();
    let mut cases = Vec::new();
    for (from, caller) in &callers {
        for number in 0..SERVICES {
            for way in &WAYS[..7] {
                // A pod's loopback has nothing to do with Services, and silence takes its time.
                if (*from, *way) == ("pod", "loopback") && number > 1 {
                    continue;
                }
                for kind in Kind::ALL {
                    let family = kind.family();
                    let to = destination(&fixture, way, number, family);
                    let own = match *from {
                        _ if to.ip().is_loopback() => to.ip(),
                        "pod" => fixture.pod_address(1, 1, family),
                        _ => fixture.cluster.lab.node(1).address(family),
                    };
                    for call in [Call::Tcp, Call::ConnectedUdp, Call::Udp] {
                        let (place, _) = PLACES[usize::from(number % 4)];
                        let name = format!("{from} {kind:?} {call:?} {way} of s{number}, endpoints {place}");
                        flows.push(flow(own, to, call, from, name));
                        cases.push(Case { fixture: &fixture, counters: &counters, caller, kind, call, to });
                    }
                }
            }
        }
    }
    let answers = explain::live(&fixture.cluster.agents[0], &flows, &[]).unwrap();
    let mut wrong = Vec::new();
    let mut outcomes: BTreeMap<&str, u32> = BTreeMap::new();
    for (case, answer) in cases.iter().zip(&answers) {
        *outcomes.entry(&answer.outcome).or_default() += 1;
        if let Err(difference) = case.judge(answer) {
            wrong.push(format!("{}: {difference}; explain: {answer:?}", answer.name));
        }
    }
    println!("{} flows: {outcomes:?}", flows.len());
    assert!(
        wrong.is_empty(),
        "{} of {} flows:\n{}",
        wrong.len(),
        flows.len(),
        wrong[..wrong.len().min(10)].join("\n")
    );
    for outcome in [
        "connected",
        "dropped-no-local-endpoint",
        "dropped-unallocated-cluster-ip",
        "rejected-no-endpoint",
        "rejected-unknown-port",
    ] {
        assert!(outcomes.contains_key(outcome), "{outcomes:?}");
    }
}

/// Another node's addresses are not this one's: nothing is translated here, and there the caller is
/// an external client.
#[test]
fn of_another_node() {
    let fixture = fixture();
    let callers = [("pod", fixture.in_pod(1, 1)), ("node", fixture.on_node(1))];
    let (mut cases, mut flows) = (Vec::new(), Vec::new());
    for (from, caller) in &callers {
        for kind in [Kind::V4, Kind::V6] {
            let family = kind.family();
            let own = match *from {
                "pod" => fixture.pod_address(1, 1, family),
                _ => fixture.cluster.lab.node(1).address(family),
            };
            // Both external policies; the internal one makes no difference.
            for number in 0..8 {
                let to = destination(&fixture, WAYS[7], number, family);
                flows.push(flow(own, to, Call::Tcp, from, format!("{from} {kind:?} s{number} {to}")));
                cases.push((caller, kind, to));
            }
        }
    }
    for here in explain::live(&fixture.cluster.agents[0], &flows, &[]).unwrap() {
        assert_eq!((here.verdict.as_str(), here.endpoint), ("unhandled", None), "{here:?}");
    }
    let outside: Vec<_> = flows.into_iter().map(|flow| Flow { from: None, ..flow }).collect();
    let there = explain::live(&fixture.cluster.agents[1], &outside, &[]).unwrap();
    let before = fixture.calls(1, "connected");
    for ((caller, kind, to), answer) in cases.into_iter().zip(&there) {
        match (meet(caller, kind, Call::Tcp, to), answer.verdict.as_str()) {
            (Ok((met, peer)), "endpoints") => {
                let pod = fixture.cluster.lab.pods().find(|pod| pod.name == met.pod).unwrap();
                let endpoint = SocketAddr::new(pod.address(kind.family()), TARGET);
                assert!(answer.candidates.contains(&endpoint), "{endpoint}: {answer:?}");
                assert_eq!(peer, to, "{answer:?}");
            }
            // Over IPv6 the caller may notice at its second SYN only.
            (Err(error), "reject") => {
                assert_eq!(error.raw_os_error(), Some(libc::ECONNREFUSED), "{answer:?}");
            }
            // No answer, until the caller's time limit.
            (Err(error), "drop") => assert_eq!(error.raw_os_error(), Some(libc::EINPROGRESS), "{answer:?}"),
            (met, _) => panic!("{met:?}: {answer:?}"),
        }
    }
    assert_eq!(fixture.calls(1, "connected"), before);
    let verdicts: BTreeSet<_> = there.iter().map(|answer| answer.verdict.as_str()).collect();
    assert!(verdicts.into_iter().eq(["drop", "endpoints", "reject"]), "{there:?}");
}
