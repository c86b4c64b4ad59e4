//! SCTP of the kernel's own sockets through an agent, where the kernel has it (emulated machines
//! with Debian's kernels do): messages, megabytes both ways, shutdown, abort and restart, to
//! endpoints on this node and on another.
//!
//! The megabytes test aggregates: Linux passes its devices many SCTP packets at once, whose chunks
//! lie in a list behind the headers.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use serde_json::Value;
use traffic_policy_testing::agent::Agent;
use traffic_policy_testing::capture;
use traffic_policy_testing::cluster::{Cluster, TARGET};
use traffic_policy_testing::lab::{Family, Lab};
use traffic_policy_testing::object::{Backend, Policy, Port, Service};
use traffic_policy_testing::pace;
use traffic_policy_testing::traffic::associations::{self, Association, Server};

/// Bytes in each direction, for each of eight associations.
const BYTES: u64 = 1_000_000;
const MTU: usize = 1500;
const ETHERNET_HEADER: usize = 14;
/// The time limit; an agent of a debug build loads its programs in a second on a quiet machine.
const PATIENCE: Duration = Duration::from_secs(30);

/// The name, the policy, the node port, and the number of the node whose pod answers at node-1.
const SERVICES: [(&str, Policy, u16, usize); 2] =
    [("here", Policy::Local, 30_090, 1), ("there", Policy::Cluster, 30_091, 2)];

fn vip(family: Family, number: usize) -> IpAddr {
    let text = match family {
        Family::V4 => format!("198.51.100.{number}"),
        Family::V6 => format!("2001:db8:51::{number}"),
    };
    text.parse().unwrap()
}

struct Scene {
    cluster: Cluster,
    agent: Agent,
    _servers: Vec<Server>,
    attach: &'static str,
}

impl Scene {
    fn new(attach: &'static str) -> Self {
        // XDP sees frames as they are on the wire.
        let cluster = Cluster::start(Lab::builder().pods(&[1, 1]).wire_offloads(attach == "tc")).unwrap();
        let lab = &cluster.lab;
        let mut servers = Vec::new();
        for family in Family::BOTH {
            servers.extend(lab.pods().map(|pod| Server::start(pod, family, TARGET).unwrap()));
        }
        for (number, (name, policy, node_port, node)) in (10..).zip(SERVICES) {
            let mut service =
                Service::new(name).policy(policy).port(Port::sctp(80, TARGET).node_port(node_port));
            for family in Family::BOTH {
                service = service.vip(vip(family, number));
                lab.route_vip(vip(family, number), lab.node(1)).unwrap();
            }
            cluster.manifests.apply(&service, &[Backend::of(lab.node(node).pod(1))]).unwrap();
        }
        // The other node only routes to its pod, and each agent takes an emulated processor half a
        // minute.
        let agent = Agent::builder(lab, lab.node(1)).attach(attach).start().unwrap();
        agent.wait_ready(PATIENCE).unwrap();
        Self { cluster, agent, _servers: servers, attach }
    }

    fn open(&self, family: Family, to: SocketAddr, port: u16) -> Association {
        let client = self.cluster.lab.client();
        let from = SocketAddr::new(client.address(family), port);
        Association::open(client.netns(), from, to)
            .unwrap_or_else(|error| panic!("{}: {error:#}", self.attach))
    }

    /// The expected answer to a line of `bytes` bytes by the pod of `node`: under policy Local it
    /// sees the client itself.
    fn answer(&self, family: Family, node: usize, bytes: usize) -> String {
        let lab = &self.cluster.lab;
        let seen = match node {
            1 => lab.client().address(family),
            _ => lab.source_towards_pods(lab.node(1), family),
        };
        format!("pod-{node}-1 {seen} {bytes}")
    }

    /// Tests messages, megabytes, and SHUTDOWN.
    fn life(&self, family: Family, to: SocketAddr, node: usize) {
        let what = format!("{} {to}", self.attach);
        let mut association = self.open(family, to, 0);
        for bytes in [1, 300, 5000] {
            assert_eq!(association.ask(bytes).expect(&what), self.answer(family, node, bytes), "{what}");
        }
        let directions: &[&str] = match (node, self.attach) {
            (1, "tc") => &["reply", "request"],
            (1, _) => &["reply"],
            (_, "tc") => &["request"],
            _ => &[],
        };
        let pod = self.cluster.lab.node(node).pod(1);
        let longest = capture::longest(pod.netns(), "eth0", || {
            association.burst(BYTES).unwrap_or_else(|error| panic!("{what}: {error:#}"));
            assert_eq!(association.ask(7).expect(&what), self.answer(family, node, 7), "{what}");
        });
        let longest = longest.expect(&what);
        for direction in directions {
            let counted = self.bytes(association.from, direction);
            let at_pod = if *direction == "reply" { longest.sent } else { longest.received };
            println!("{what}, {direction}: {counted} bytes, the longest frame has {at_pod}");
            assert!(counted > BYTES && at_pod > MTU + ETHERNET_HEADER, "{what}, {direction}: no aggregates");
        }
        association.shut_down().expect(&what);
    }

    /// Tests a client that vanishes without notice and comes back with the same port, which the
    /// endpoint takes for a restart.
    fn restart(&self, family: Family, to: SocketAddr, node: usize) {
        let client = self.cluster.lab.client().netns();
        let prefix = if family == Family::V4 { 32 } else { 128 };
        let mut former = self.open(family, to, 0);
        let from = former.from;
        assert_eq!(former.ask(3).unwrap(), self.answer(family, node, 3));
        client.netlink(async |net| net.unreachable(to.ip(), prefix).await).unwrap();
        former.abort().unwrap();
        client.netlink(async |net| net.reachable(to.ip(), prefix).await).unwrap();
        let mut anew = self.open(family, to, from.port());
        for bytes in [4, 2000] {
            assert_eq!(anew.ask(bytes).unwrap(), self.answer(family, node, bytes), "{}", self.attach);
        }
        // The flow has the new tags by now.
        anew.abort().unwrap();
        self.wait_for_state(from, "reset");
    }

    fn flow(&self, from: SocketAddr) -> Option<Value> {
        let flows = self.agent.json(&["flows"]).unwrap();
        flows.as_array().unwrap().iter().find(|flow| flow["client"] == from.to_string()).cloned()
    }

    fn wait_for_state(&self, from: SocketAddr, state: &str) {
        pace::until(&format!("{} {from}: {state}", self.attach), Duration::from_secs(5), || {
            self.flow(from).is_some_and(|flow| flow["state"] == state)
        });
    }

    /// The counted bytes of a flow in a direction.
    fn bytes(&self, from: SocketAddr, direction: &str) -> u64 {
        self.flow(from).unwrap()[format!("{direction}_bytes")].as_u64().unwrap()
    }
}

fn lives(test: &str, attach: &'static str) {
    if !associations::are_there() {
        let why = "this kernel has no SCTP (`cargo xtask vm test policy::sctp_sockets`)";
        traffic_policy_testing::skipped(test, why);
        return;
    }
    let scene = Scene::new(attach);
    for (number, (_, _, node_port, node)) in (10..).zip(SERVICES) {
        for family in Family::BOTH {
            let node_port = scene.cluster.at(1, family, node_port);
            scene.life(family, node_port, node);
            scene.life(family, SocketAddr::new(vip(family, number), 80), node);
            scene.restart(family, node_port, node);
        }
    }
    for hook in ["tc-ingress", "tc-egress", "xdp"] {
        for outcome in ["dropped-internal-error", "passed-malformed", "passed-missed-tail-call"] {
            assert_eq!(scene.agent.packets(hook, outcome).unwrap_or_default(), 0, "{hook} {outcome}");
        }
    }
}

#[test]
fn live_by_tc() {
    lives("live_by_tc", "tc");
}

#[test]
fn live_by_xdp() {
    lives("live_by_xdp", "xdp");
}
