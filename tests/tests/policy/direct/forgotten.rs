//! Connections that an endpoint's node has forgotten: its maps are made anew, and the next segment
//! is for the stack of the pod, which knows the connection. With direct forwarding and Maglev
//! tables none is cut, whichever node is in front.

use std::net::SocketAddr;
use std::time::Duration;

use traffic_policy_testing::cluster::{Cluster, TARGET};
use traffic_policy_testing::lab::{Family, Lab, Pod};
use traffic_policy_testing::object::{Backend, lease};
use traffic_policy_testing::pace::until;
use traffic_policy_testing::packet::{Packet, flag};
use traffic_policy_testing::pinned;

use super::{PATIENCE, VIP_PORT, VIPS, service};
use crate::spoofed::{Connection, Stranger};

const CONNECTIONS: usize = 12;
/// The nodes with pods; the first node has none.
const HOMES: [usize; 2] = [2, 3];

/// Open connections of the client.
struct Scene {
    cluster: Cluster,
    connections: Vec<Connection>,
}

impl Scene {
    /// The first node is in front of these endpoints.
    fn start(attach: &str, forwarding: &str, backends: &[usize]) -> Self {
        let mut cluster = Cluster::start(Lab::builder().pods(&[0, 2, 2])).unwrap();
        let lease = |node| lease::tunnels(node, &Family::BOTH, "ipip,udp");
        let leases: Vec<_> = cluster.lab.nodes().iter().map(lease).collect();
        cluster.manifests.write("leases", &leases).unwrap();
        cluster.manifests.apply(&service(), &some(&cluster, backends)).unwrap();
        let flags = ["--forwarding", forwarding, "--algorithm", "maglev", "--maglev-size", "251"];
        cluster.launch(|agent| agent.attach(attach).flags(&flags)).unwrap();
        let mut scene = Self { cluster, connections: Vec::new() };
        scene.in_front(1);
        scene.connect();
        scene
    }

    /// Opens new connections.
    fn connect(&mut self) {
        self.connections.clear();
        for vip in VIPS {
            let to = SocketAddr::new(vip, VIP_PORT);
            self.connections.extend((0..CONNECTIONS).map(|_| Connection::open(&self.cluster, to)));
        }
    }

    /// Makes these the Service's endpoints on all nodes.
    fn set_endpoints(&self, numbers: &[usize]) {
        let endpoints = some(&self.cluster, numbers);
        self.cluster.manifests.endpoints(&service(), &endpoints).unwrap();
        let pods: Vec<_> =
            numbers.iter().map(|number| self.cluster.lab.pods().nth(*number).unwrap()).collect();
        for agent in &self.cluster.agents {
            until("the endpoints have changed", PATIENCE, || {
                let ports = agent.json(&["services", "default/web"]).unwrap();
                ports.as_array().unwrap().iter().all(|port| {
                    let found = port["endpoints"].as_array().unwrap();
                    let is_there = |pod: &&Pod| {
                        Family::BOTH.iter().any(|family| {
                            let address = SocketAddr::new(pod.address(*family), TARGET).to_string();
                            found.iter().any(|endpoint| endpoint["address"] == *address)
                        })
                    };
                    found.len() == pods.len() && pods.iter().all(is_there)
                })
            });
        }
    }

    /// Makes the router send everything to this node.
    fn in_front(&self, number: usize) {
        for vip in VIPS {
            self.cluster.lab.route_vip(vip, self.cluster.lab.node(number)).unwrap();
        }
    }

    /// Removes all that these nodes know, and starts their agents anew.
    fn forget(&mut self, nodes: &[usize]) {
        for number in nodes {
            let agent = &mut self.cluster.agents[number - 1];
            agent.stop().unwrap();
            let output = agent.command(&["cleanup", "--force"]).unwrap();
            assert!(output.status.success(), "{output:?}");
            agent.start_again().unwrap();
            agent.wait_ready(Duration::from_secs(20)).unwrap();
            assert_eq!(agent.json(&["flows"]).unwrap(), serde_json::json!([]), "node-{number} has forgotten");
        }
    }

    /// Sends segments in the client's name, whose numbers are not those of its connections. They
    /// reach no pod, and nobody learns from them.
    fn forge(&self) {
        let agents = || HOMES.iter().map(|number| &self.cluster.agents[number - 1]);
        let dropped = || -> u64 {
            agents().map(|agent| agent.packets("tc-ingress", "dropped-out-of-window").unwrap()).sum()
        };
        let (before, stranger) = (dropped(), Stranger::at(&self.cluster));
        for (number, connection) in (1_u32..).zip(&self.connections) {
            let to = connection.stream.get_ref().peer_addr().unwrap();
            let [from, to] = [connection.client(), to].map(|end| (end.ip(), end.port()));
            let numbers = [0x9e37_79b9, 0x85eb_ca6b].map(|by| number.wrapping_mul(by));
            let segment = Packet::tcp(from, to, flag::ACK).numbers(numbers[0], numbers[1]);
            stranger.send(&segment.payload(b"forged"));
        }
        let wanted = before + self.connections.len() as u64;
        until("forged segments are dropped", PATIENCE, || dropped() >= wanted);
        for agent in agents() {
            let flows = agent.json(&["flows"]).unwrap();
            let here = flows.as_array().unwrap().iter().filter(|flow| flow["kind"] == "delivered");
            assert_eq!(here.count(), 0, "{flows}");
        }
    }

    /// Sends a request on every connection, which its pod answers as the client's.
    fn ask_all(&mut self, when: &str) {
        for connection in &mut self.connections {
            let (client, pod) = (connection.client(), connection.pod.clone());
            let answer =
                connection.ask("there?").unwrap_or_else(|error| panic!("{when}, {pod}, {client}: {error:#}"));
            assert_eq!((answer.pod, answer.client), (pod, client), "{when}");
        }
    }
}

/// The backends of these numbers: the second node has 0 and 1, the third one 2 and 3.
fn some(cluster: &Cluster, numbers: &[usize]) -> Vec<Backend> {
    let all: Vec<_> = cluster.lab.pods().collect();
    numbers.iter().map(|number| Backend::of(all[*number])).collect()
}

fn by_endpoints_nodes(attach: &str, forwarding: &str) {
    let mut scene = Scene::start(attach, forwarding, &[0, 2]);
    scene.forget(&HOMES);
    scene.forge();
    scene.ask_all("the node in front knows the connections");
    scene.forget(&HOMES);
    scene.in_front(2);
    scene.forge();
    scene.ask_all("the node in front has forgotten them, too, and one of the pods");
}

#[test]
fn by_endpoints_nodes_tc() {
    by_endpoints_nodes("tc", "direct");
}

#[test]
fn by_endpoints_nodes_xdp() {
    by_endpoints_nodes("xdp", "direct");
}

#[test]
fn by_endpoints_nodes_tunnel() {
    by_endpoints_nodes("xdp", "tunnel");
}

/// All nodes have forgotten the connections before the endpoints change: the pods of former owners
/// are asked, on the owner's node and on others.
#[test]
fn by_all_nodes_before_the_endpoints_change() {
    let mut scene = Scene::start("tc", "direct", &[0, 2]);
    scene.forget(&[1, 2, 3]);
    let endpoints = some(&scene.cluster, &[1, 3]);
    scene.cluster.manifests.endpoints(&service(), &endpoints).unwrap();
    for agent in &scene.cluster.agents {
        until("the endpoints have changed", PATIENCE, || {
            let ports = agent.json(&["services", "default/web"]).unwrap();
            ports[0]["former_owners"]["slots"].as_u64() > Some(0)
        });
    }
    scene.ask_all("the endpoints have changed");
}

/// A pod that is back with its address, as one of a StatefulSet, is in another namespace: its stack
/// is asked, not that of its predecessor.
#[test]
fn by_the_node_of_a_pod_that_is_back() {
    let mut scene = Scene::start("tc", "direct", &[0]);
    scene.set_endpoints(&[2]);
    // The first pod's addresses move to the namespace of the second one.
    let lab = &scene.cluster.lab;
    let [first, second] = [0, 1].map(|number| lab.pods().nth(number).unwrap());
    first.netns().netlink(async |net| net.delete("eth0").await).unwrap();
    for family in Family::BOTH {
        let (address, prefix) = (first.address(family), family.prefix());
        second.netns().netlink(async |net| net.address("eth0", address, prefix).await).unwrap();
    }
    lab.flush_neighbours().unwrap();
    scene.set_endpoints(&[0]);
    scene.connect();
    let here = &scene.cluster.lab.pods().nth(1).unwrap().name;
    assert!(scene.connections.iter().all(|connection| connection.pod == *here), "that of another pod");
    for table in ["tp_flows4", "tp_flows6"] {
        pinned::empty(&pinned::path(scene.cluster.agents[1].pin_dir(), table).unwrap()).unwrap();
    }
    scene.ask_all("the pod's node has forgotten the connections");
}
