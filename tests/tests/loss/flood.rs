//! Floods from a million sources at a node with a small flow table: established connections
//! survive, and new ones are made.

use std::net::{IpAddr, SocketAddr};
use std::thread::sleep;
use std::time::{Duration, Instant};

use serde_json::Value;
use traffic_policy_testing::agent::Agent;
use traffic_policy_testing::cluster::{Cluster, TARGET};
use traffic_policy_testing::flood::{STRANGERS, Variation, Wire, stranger};
use traffic_policy_testing::lab::{Addresses, Family, plan};
use traffic_policy_testing::object::{Backend, Port, Service};
use traffic_policy_testing::pace::until;
use traffic_policy_testing::packet::{Packet, flag};
use traffic_policy_testing::traffic::server::Identity;
use traffic_policy_testing::traffic::{Faults, Server};

use crate::cluster::{self, NODE_PORT, PATIENCE};
use crate::crowd::{Conversation, Crowd, Newcomers};
use crate::quiet;

/// The number of active connections, and of silent ones: with two entries each, half of the small
/// table.
const CONNECTIONS: usize = 1_000;
const SMALL: u32 = 8_192;
/// The entries of the flow table, with room for 30,000 flows in addition to these: at 70,000 SYNs a
/// second a client has 0.4 s for its handshake, so that a segment which the flood pushes out of a
/// queue may be retransmitted.
const ENTRIES: u32 = 65_536;
const SOURCES: u32 = 1 << 20;

/// The port of the pod on node-1; [`NODE_PORT`] is that of the pod on node-2.
const NEAR_PORT: u16 = 30_081;
/// The port of a Service whose endpoint is an unused address.
const NOBODY_PORT: u16 = 30_082;
/// The port of a UDP server that never answers.
const SILENT_PORT: u16 = 30_083;
const SILENT_TARGET: u16 = 8_083;

/// Node-1 under attack, in one family.
struct Attacked {
    cluster: Cluster,
    family: Family,
    entries: u32,
    wire: Wire,
    what: String,
    _silent: Server,
}

impl Attacked {
    fn start(attach: &str, family: Family, entries: u32, flags: &[&str]) -> Self {
        let mut cluster = cluster::without_agents(&[1, 1], attach);
        let [near, far] = [1, 2].map(|node| cluster.lab.node(node).pod(1));
        let identity = Identity { pod: far.name.clone(), node: far.node.clone() };
        let faults = Faults { lose_request: Some(1), ..Faults::default() };
        let silent = Server::start_in(far.netns(), SILENT_TARGET, identity, faults, &cluster.ledger).unwrap();
        let web = cluster::web().port(Port::udp(83, SILENT_TARGET).node_port(SILENT_PORT));
        cluster.manifests.apply(&web, &[Backend::of(far)]).unwrap();
        let tcp = |name, port| Service::new(name).port(Port::tcp(80, TARGET).node_port(port));
        cluster.manifests.apply(&tcp("near", NEAR_PORT), &[Backend::of(near)]).unwrap();
        let nobody = Addresses::new([11, 255, 255, 255], [0x2001, 0xdb8, 0xf100, 1, 0, 0, 0, 1]);
        cluster.manifests.apply(&tcp("nobody", NOBODY_PORT), &[Backend::at(&nobody)]).unwrap();
        // Packets to the forged sources end at the client, which does not answer them.
        let client = cluster.lab.client();
        let quietly = cluster.lab.router().netlink(async |net| {
            for (family, (network, prefix)) in Family::BOTH.into_iter().zip(STRANGERS) {
                net.route(network, prefix, client.address(family)).await?;
            }
            anyhow::Ok(())
        });
        quietly.unwrap();
        let number = entries.to_string();
        let sizes = ["--flow-entries", &number, "--flow-entries-v6", &number];
        // Time-outs that end a flood's flows within the test; those of established connections are
        // the defaults.
        let short = ["--idle-unassured", "5s", "--idle-udp", "5s", "--idle-udp-answered", "20s"];
        let reset = ["--idle-reset", "1s"];
        cluster
            .launch(|agent| agent.attach(attach).flags(&sizes).flags(&short).flags(&reset).flags(flags))
            .unwrap();
        let (router, node) = (cluster.lab.router(), cluster.lab.node(1));
        let wire = Wire::open(router, ("br0", &node.name), plan::gateway(0), node.addresses).unwrap();
        Self { cluster, family, entries, wire, what: format!("{attach} {family:?}"), _silent: silent }
    }

    fn agent(&self) -> &Agent {
        &self.cluster.agents[0]
    }

    fn at(&self, port: u16) -> SocketAddr {
        self.cluster.at(1, self.family, port)
    }

    /// Opens connections like [`Crowd::gather`], a quarter of them with the pod of node-1.
    fn crowd(&self) -> Crowd {
        let targets = [NODE_PORT, NODE_PORT, NODE_PORT, NEAR_PORT].map(|port| self.at(port));
        Crowd::gather(self.cluster.lab.client().netns(), &targets, CONNECTIONS)
    }

    fn newcomers(&self, port: u16) -> Newcomers {
        Newcomers::start(self.cluster.lab.client().netns(), self.at(port))
    }

    fn tcp(&self, flags: u8, copies: impl IntoIterator<Item = Variation>) -> u64 {
        let node = (self.at(0).ip(), 0);
        self.wire.flood(Packet::tcp(node, node, flags), copies).unwrap()
    }

    /// Sends SYNs. One in `one_of` goes to the pod of node-2, which answers: the others cost this
    /// machine less.
    fn syns(&self, sources: u32, one_of: u32) {
        let copies = (0..sources).map(|number| Variation {
            source: (stranger(self.family, number), 1024 + (number & 0x7fff) as u16),
            destination_port: if number % one_of == 0 { NODE_PORT } else { NOBODY_PORT },
            sequence: number.wrapping_mul(0x9e37_79b9),
        });
        self.note("SYNs", || self.tcp(flag::SYN, copies));
    }

    /// Sends datagrams in rounds from `sources` sources, each twice: a source that goes on after an
    /// answer counts as real.
    fn datagrams(&self, port: u16, rounds: u32, sources: u32) {
        self.note(&format!("datagrams to {port}"), || {
            let node = (self.at(0).ip(), 0);
            let mut sent = 0;
            for number in 0..2 * rounds {
                let first = number / 2 * sources;
                let copies = (first..first + sources).map(|number| Variation {
                    source: (stranger(self.family, number), 5_000),
                    destination_port: port,
                    sequence: 0,
                });
                sent += self.wire.flood(Packet::udp(node, node), copies).unwrap();
                // The pause lets the answers pass: only a datagram after an answer assures its
                // flow.
                sleep(Duration::from_millis(20));
            }
            sent
        });
    }

    /// Sends resets in the endpoint's name to every port that may be a source port of the node, and
    /// in the clients' names, with numbers all over the circle.
    fn resets(&self, crowd: &Crowd) {
        let endpoint: IpAddr = self.cluster.lab.node(2).pod(1).address(self.family);
        let mixed = |number: u32| number.wrapping_mul(0x9e37_79b9);
        let to_ports = (1024..=65_535_u16).map(|port| Variation {
            source: (endpoint, TARGET),
            destination_port: port,
            sequence: mixed(port.into()),
        });
        let clients = crowd.silent().zip(0_u32..).flat_map(|(client, number)| {
            [NODE_PORT, NEAR_PORT].into_iter().cycle().zip(0..16).map(move |(destination_port, guess)| {
                let sequence = mixed(number * 16 + guess);
                Variation { source: (client.ip(), client.port()), destination_port, sequence }
            })
        });
        self.note("RSTs", || self.tcp(flag::RST, to_ports.chain(clients)));
    }

    /// Exchanges answered datagrams until their flows fill the table to the last entry.
    fn fill(&self) {
        for _ in 0..20 {
            self.datagrams(NODE_PORT, 5, 1_000);
            if self.status()["flows"]["full_seconds_ago"].is_number() {
                return;
            }
        }
        panic!("{}: the table is not full: {}", self.what, self.status()["flows"]);
    }

    fn note(&self, what: &str, flood: impl FnOnce() -> u64) {
        let start = Instant::now();
        let sent = flood();
        println!("{}: {sent} {what} in {:?}", self.what, start.elapsed());
    }

    fn scraped(&self, metric: &str, labels: &[(&str, &str)]) -> f64 {
        let family = if self.family == Family::V4 { "IPv4" } else { "IPv6" };
        let scrape = self.agent().scrape().unwrap();
        scrape.value(metric, &[labels, &[("ip_family", family)]].concat()).unwrap()
    }

    fn status(&self) -> Value {
        self.agent().json(&["status"]).unwrap()
    }

    /// The number of packets that left the packet path of node-1 at device eth0 with an outcome.
    fn packets(&self, outcome: &str) -> u64 {
        let status = self.status();
        let rows = status["counters"].as_array().unwrap().iter();
        let of = rows.filter(|row| row["outcome"] == outcome && row["hook"] != "socket");
        of.map(|row| row["packets"].as_u64().unwrap()).sum()
    }

    /// Waits until less than three quarters of the flow table, and of the SNAT ports, are in
    /// use.
    fn wait_for_room(&self) {
        until(&format!("{}: room in the table", self.what), PATIENCE, || {
            self.scraped("traffic_policy_map_entries", &[("map", "flows")]) < f64::from(self.entries) * 0.75
        });
        until(&format!("{}: SNAT ports", self.what), PATIENCE, || {
            let ports = self.agent().scrape().unwrap().value("traffic_policy_snat_ports", &[]).unwrap();
            self.scraped("traffic_policy_snat_flows", &[]) < ports * 0.75
        });
    }
}

fn floods(attach: &str, family: Family, sources: u32) {
    let _alone = quiet::alone();
    let attacked = Attacked::start(attach, family, ENTRIES, &[]);
    let what = &attacked.what;
    let mut crowd = attacked.crowd();

    let before = attacked.packets("forwarded");
    let newcomers = attacked.newcomers(NODE_PORT);
    attacked.syns(sources, 10);
    newcomers.finish(&format!("{what} SYNs"));
    // Most of the packets have arrived, and have created flows: many times more than there is room
    // for.
    let forwarded = attacked.packets("forwarded") - before;
    assert!(forwarded > u64::from(sources) / 2, "{what}: only {forwarded} packets were forwarded");
    crowd.speak(what);

    let newcomers = attacked.newcomers(NODE_PORT);
    attacked.fill();
    attacked.datagrams(SILENT_PORT, 1, 20_000);
    newcomers.finish(&format!("{what} datagrams"));
    // The agent has noticed.
    until(&format!("{what}: the count of episodes"), PATIENCE, || {
        attacked.scraped("traffic_policy_flow_table_full_total", &[]) > 0.0
    });
    let flag =
        if family == Family::V4 { "raise --flow-entries after" } else { "raise --flow-entries-v6 after" };
    attacked.agent().wait_said(&["is full", flag], PATIENCE).unwrap();
    attacked.wait_for_room();
    crowd.speak(what);

    let client = attacked.cluster.lab.client().netns();
    // One RST may be lost in the flood, and none is sent again.
    let reset: Vec<_> =
        client.run(|| (0..3).map(|_| Conversation::open(attacked.at(NODE_PORT)).unwrap()).collect());
    let newcomers = attacked.newcomers(NODE_PORT);
    attacked.resets(&crowd);
    newcomers.finish(&format!("{what} RSTs"));
    // Flows that were reset are removed by the time at which this one is: only then it shows
    // whether others were reset, too.
    let gone: Vec<_> = reset.into_iter().map(|reset| reset.reset().to_string()).collect();
    until(&format!("{what}: the end of a connection that was reset"), PATIENCE, || {
        let flows = attacked.agent().json(&["flows"]).unwrap();
        let has_flow =
            |client: &&String| flows.as_array().unwrap().iter().any(|flow| flow["client"] == client.as_str());
        gone.iter().filter(has_flow).count() < gone.len()
    });
    crowd.leave(what);
}

#[test]
fn xdp_ipv4() {
    floods("xdp", Family::V4, SOURCES);
}

#[test]
fn tc_ipv6() {
    floods("tc", Family::V6, SOURCES / 4);
}

/// No sweep runs, and there are only slightly more source ports towards the endpoint than flows
/// that fit the table.
#[test]
fn without_an_agent_and_with_few_ports() {
    let _alone = quiet::alone();
    let mut attacked = Attacked::start("tc", Family::V4, SMALL, &["--snat-ports", "20000-24199"]);
    attacked.cluster.agents[0].kill().unwrap();
    let mut crowd = attacked.crowd();
    // The packet path waits for this time before it acts without an agent.
    until("the agent's absence", PATIENCE, || {
        attacked.status()["agent"]["seen_seconds_ago"].as_f64().unwrap() > 11.0
    });
    attacked.syns(10_000, 1);
    // There are more ports than flows that fit the table: the oldest flows make room, and their
    // ports are free.
    assert_eq!(attacked.packets("dropped-no-snat-port"), 0);
    let client = attacked.cluster.lab.client().netns();
    client.run(|| Conversation::open(attacked.at(NODE_PORT)).map(drop)).unwrap();
    attacked.fill();
    // An endpoint of this node needs no port.
    let newcomers = attacked.newcomers(NEAR_PORT);
    attacked.syns(10_000, 1);
    attacked.fill();
    newcomers.finish("without an agent");
    crowd.speak("without an agent");
    client.run(|| Conversation::open(attacked.at(NODE_PORT)).map(drop)).unwrap();

    attacked.cluster.agents[0].start_again().unwrap();
    attacked.agent().wait_ready(PATIENCE).unwrap();
    attacked.wait_for_room();
    crowd.leave("with an agent again");
}
