//! Changes of the forwarding under open connections: by the annotation, and by agents that are
//! started again with another flag. No connection is cut, and each keeps the way that it began
//! with, by TC and by XDP in front.

use std::collections::BTreeMap;
use std::net::UdpSocket;
use std::time::Duration;

use serde_json::Value;
use traffic_policy_testing::agent::Agent;
use traffic_policy_testing::cluster::{Cluster, TARGET};
use traffic_policy_testing::lab::{Family, Lab};
use traffic_policy_testing::object::{Port, Service, lease};
use traffic_policy_testing::pace::{scaled, until};
use traffic_policy_testing::traffic::{Answer, HeldConnections};

use super::{NODE_PORT, PATIENCE, VIP_PORT, VIPS, service};

/// The hooks of the nodes: the first and the last are in front, the others have a pod each.
const HOOKS: [&str; 4] = ["tc", "tc", "xdp", "xdp"];
const FRONTS: [usize; 2] = [1, 4];
const HOMES: [usize; 2] = [2, 3];
/// The connections that begin at each node in front after each change.
const CONNECTIONS: usize = 8;
/// The time between two requests of a connection: it leaves the processor to agents that start.
const PAUSE: Duration = Duration::from_millis(60);

/// Open connections through a node in front.
struct Held {
    meter: HeldConnections,
    front: usize,
    begun: &'static str,
}

struct Scene {
    cluster: Cluster,
    held: Vec<Held>,
}

impl Scene {
    /// Four nodes and agents with this flag on those in front, which all take part.
    fn start(flags: [&str; 2]) -> Self {
        let cluster = Cluster::start(Lab::builder().pods(&[0, 1, 1, 0])).unwrap();
        cluster.manifests.write("leases", &leases(&cluster)).unwrap();
        cluster.manifests.apply(&service(), &cluster.backends()).unwrap();
        let mut scene = Self { cluster, held: Vec::new() };
        let agents = [flags[0], "snat", "snat", flags[1]];
        scene.cluster.agents = (1..).zip(agents).map(|(number, flag)| scene.agent(number, flag)).collect();
        scene.wait_ready();
        scene
    }

    /// Waits until the agents of endpoints' nodes know these numbers of other nodes.
    fn expect_known(&self, counts: [usize; 2]) {
        for (home, count) in HOMES.into_iter().zip(counts) {
            until(&format!("node-{home} knows {count} nodes"), PATIENCE, || {
                let status = self.cluster.agents[home - 1].json(&["status"]).unwrap();
                let known = &status["agent"]["report"]["direct"]["addresses"];
                known.as_object().map_or(0, serde_json::Map::len) == count
            });
        }
    }

    fn agent(&self, number: usize, flag: &str) -> Agent {
        let builder = Agent::builder(&self.cluster.lab, self.cluster.lab.node(number));
        builder.attach(HOOKS[number - 1]).flags(&["--forwarding", flag]).start().unwrap()
    }

    fn wait_ready(&self) {
        for agent in &self.cluster.agents {
            agent.wait_ready(Duration::from_secs(20)).unwrap();
        }
    }

    /// Opens connections through both nodes in front, one of which forwards in each of these ways.
    fn hold(&mut self, ways: [&'static str; 2]) {
        for (front, begun) in FRONTS.into_iter().zip(ways) {
            let to = Family::BOTH.map(|family| self.cluster.at(front, family, NODE_PORT));
            let client = self.cluster.lab.client().netns();
            let meter = HeldConnections::start(client, &to, CONNECTIONS, PAUSE).unwrap();
            self.held.push(Held { meter, front, begun });
        }
        self.expect_ways();
    }

    /// Waits until the nodes in front have the established flows of all open connections, each of
    /// the kind that it began as, and no others.
    fn expect_ways(&self) {
        for front in FRONTS {
            let mut wanted: BTreeMap<String, usize> = BTreeMap::new();
            for held in self.held.iter().filter(|held| held.front == front) {
                let kind = if held.begun == "snat" { "forwarded" } else { held.begun };
                *wanted.entry(kind.to_owned()).or_default() += CONNECTIONS;
            }
            let what = format!("node-{front} has {wanted:?}");
            until(&what, PATIENCE, || {
                let flows = self.cluster.agents[front - 1].json(&["flows", "--state", "assured"]).unwrap();
                let mut found = BTreeMap::new();
                for flow in flows.as_array().unwrap() {
                    *found.entry(flow["kind"].as_str().unwrap().to_owned()).or_default() += 1;
                }
                found == wanted
            });
        }
    }

    /// Waits until all of these outcomes are counted again at each endpoint's node.
    fn expect_replies(&self, outcomes: &[&str]) {
        let of = |(home, outcome): (usize, &str)| {
            self.cluster.agents[home - 1].packets("tc-egress", outcome).unwrap()
        };
        for home in HOMES {
            for outcome in outcomes {
                let before = of((home, outcome));
                until(&format!("node-{home}: {outcome}"), PATIENCE, || of((home, outcome)) > before + 20);
            }
        }
    }

    /// Ends all connections, none of which has been cut.
    fn finish(self) {
        let lab = &self.cluster.lab;
        for Held { meter, front, begun } in self.held {
            let report = meter.finish();
            let what = format!("begun under {begun} at node-{front}");
            println!("{what}: {report}");
            assert!(report.is_clean(), "{what}: {report}");
            assert_eq!(report.connections, CONNECTIONS as u64, "{what}");
            let seen = if begun == "snat" { lab.node(front).addresses } else { lab.client().addresses };
            let seen = Family::BOTH.map(|family| seen.of(family));
            assert_eq!(report.clients, seen.into(), "{what}: what pods see");
        }
    }
}

/// The Leases of all nodes.
fn leases(cluster: &Cluster) -> Vec<Value> {
    let lease = |node| lease::tunnels(node, &Family::BOTH, "ipip,udp");
    cluster.lab.nodes().iter().map(lease).collect()
}

/// Kubernetes removes Leases with a Node object, also when that is made anew: packets of open
/// connections are still opened, requests and replies.
#[test]
fn leases_that_are_gone_for_a_moment_cut_no_connection() {
    let ways = ["direct", "tunnel"];
    let mut scene = Scene::start(ways);
    scene.hold(ways);
    scene.expect_known([3, 3]);
    // Requests from node-1 are opened without a Lease, and replies from node-2.
    let all = leases(&scene.cluster);
    scene.cluster.manifests.write("leases", &all[2..]).unwrap();
    scene.expect_known([2, 1]);
    scene.expect_replies(&["replied-local", "replied-to-front"]);
    scene.cluster.manifests.write("leases", &all).unwrap();
    scene.expect_known([3, 3]);
    scene.expect_replies(&["replied-local", "replied-to-front"]);
    scene.finish();
}

#[test]
fn the_annotation_cuts_no_connection() {
    let mut scene = Scene::start(["snat"; 2]);
    for forwarding in ["direct", "tunnel", "direct"] {
        let web = service().annotation("traffic-policy.io/forwarding", forwarding);
        scene.cluster.manifests.service(&web).unwrap();
        for front in FRONTS {
            until(&format!("node-{front} forwards by {forwarding}"), PATIENCE, || {
                let served = scene.cluster.agents[front - 1].json(&["services", "default/web"]).unwrap();
                served.as_array().unwrap().iter().all(|port| port["forwarding"] == forwarding)
            });
        }
        scene.hold([forwarding; 2]);
    }
    scene.expect_replies(&["replied-local", "replied-to-front"]);
    scene.expect_ways();
    scene.finish();
}

/// A Service that is deleted takes no new connections, and its open ones go on, as those of
/// kube-proxy do by conntrack: requests are opened, and replies by tunnel in front.
fn a_deleted_service_cuts_no_connection(dispatch: &str, change: fn(&Cluster)) {
    let ways = ["direct", "tunnel"];
    let mut scene = Scene::start(ways);
    let leases = scene.cluster.lab.nodes().iter().map(|node| lease::tunnels(node, &Family::BOTH, dispatch));
    scene.cluster.manifests.write("leases", &leases.collect::<Vec<_>>()).unwrap();
    let [preferred, _] = dispatch.split(',').collect::<Vec<_>>().try_into().unwrap();
    for front in FRONTS {
        until(&format!("node-{front} sends within {preferred}"), PATIENCE, || {
            let status = scene.cluster.agents[front - 1].json(&["status"]).unwrap();
            HOMES.iter().all(|home| {
                status["agent"]["report"]["direct"]["dispatch"][format!("node-{home}")] == preferred
            })
        });
    }
    scene.hold(ways);
    change(&scene.cluster);
    for agent in &scene.cluster.agents {
        until("the node port is gone", PATIENCE, || {
            let ports = agent.json(&["services"]).unwrap();
            let frontends =
                ports.as_array().unwrap().iter().flat_map(|port| port["frontends"].as_array().unwrap());
            frontends.map(|frontend| &frontend["kind"]).all(|kind| kind != "NodePort")
        });
    }
    scene.expect_replies(&["replied-local", "replied-to-front"]);
    scene.expect_ways();
    scene.finish();
}

#[test]
fn a_deleted_service_cuts_no_connection_within_ip() {
    a_deleted_service_cuts_no_connection("ipip,udp", delete);
}

#[test]
fn a_deleted_service_cuts_no_connection_within_udp() {
    a_deleted_service_cuts_no_connection("udp,ipip", delete);
}

/// The same, where the Service stays, and loses the port at which the connections came.
#[test]
fn a_deleted_node_port_cuts_no_connection() {
    a_deleted_service_cuts_no_connection("udp,ipip", |cluster| {
        let web = Service::new("web").port(Port::tcp(VIP_PORT, TARGET)).port(Port::udp(VIP_PORT, TARGET));
        cluster.manifests.service(&web.vip(VIPS[0]).vip(VIPS[1])).unwrap();
    });
}

fn delete(cluster: &Cluster) {
    cluster.manifests.delete(&service()).unwrap();
}

/// A node whose Lease is gone opens packets no longer, or is about to: a client that sends
/// datagrams without a pause, from one port, gets to an endpoint by SNAT, while connections keep
/// their way.
#[test]
fn datagrams_choose_anew_once_their_node_opens_no_more() {
    let mut scene = Scene::start(["direct"; 2]);
    scene.hold(["direct"; 2]);
    let client = scene.cluster.lab.client().netns();
    let sockets = Family::BOTH.map(|family| {
        let to = scene.cluster.at(1, family, NODE_PORT);
        let any = if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
        let socket = client.run(|| UdpSocket::bind(any)).unwrap();
        socket.connect(to).unwrap();
        socket.set_read_timeout(Some(scaled(PAUSE))).unwrap();
        socket
    });
    // The client's addresses as its pods see them, of the datagrams that are answered.
    let seen = || {
        sockets.each_ref().map(|socket| {
            let mut answer = [0; 512];
            socket.send(b"who").unwrap();
            let length = socket.recv(&mut answer).ok()?;
            Answer::parse(&String::from_utf8_lossy(&answer[..length])).ok().map(|answer| answer.client.ip())
        })
    };
    let as_itself = Family::BOTH.map(|family| Some(scene.cluster.lab.client().address(family)));
    let as_front = Family::BOTH.map(|family| Some(scene.cluster.lab.node(1).address(family)));
    until("both are forwarded directly", PATIENCE, || seen() == as_itself);
    let all = leases(&scene.cluster);
    let fronts = FRONTS.map(|front| all[front - 1].clone());
    scene.cluster.manifests.write("leases", &fronts).unwrap();
    until("both are forwarded by SNAT", PATIENCE, || seen() == as_front);
    scene.cluster.manifests.write("leases", &all).unwrap();
    scene.finish();
}

/// Each agent in front is started again with every other flag, in the end all agents are.
#[test]
fn another_flag_cuts_no_connection() {
    let [first, second, third] = [["snat", "direct"], ["direct", "snat"], ["tunnel", "tunnel"]];
    let mut scene = Scene::start(first);
    scene.hold(first);
    for (front, flag) in FRONTS.into_iter().zip(second) {
        scene.cluster.agents[front - 1].kill().unwrap();
        scene.cluster.agents[front - 1] = scene.agent(front, flag);
    }
    scene.wait_ready();
    scene.hold(second);
    scene.cluster.stop_agents().unwrap();
    for number in 1..=HOOKS.len() {
        scene.cluster.agents[number - 1] = scene.agent(number, "tunnel");
    }
    scene.wait_ready();
    scene.hold(third);
    scene.expect_replies(&["replied-local", "replied-to-front"]);
    scene.expect_ways();
    scene.finish();
}
