//! `flows` lists connections with their state, by filters, also while no agent runs.

use std::net::{IpAddr, Ipv4Addr};
use std::path::Path;
use std::time::{Duration, Instant};

use aya::maps::{HashMap, Map, MapData};
use serde_json::Value;
use traffic_policy_dataplane::ToWire;
use traffic_policy_ebpf::abi::{self, Address4, FlowKey, PROTOCOL_TCP, Ports, Tuple, kind};
use traffic_policy_ebpf::tcp::{ANSWERED, ASSURED};
use traffic_policy_testing::agent::Agent;
use traffic_policy_testing::cluster::{Cluster, Protocol, TARGET};
use traffic_policy_testing::lab::{Family, Lab};
use traffic_policy_testing::object::Policy;
use traffic_policy_testing::pace::{look_until, scaled, until};
use traffic_policy_testing::traffic::HeldConnections;

const LIMIT: Duration = Duration::from_secs(10);

fn list(agent: &Agent, filters: &[&str]) -> Vec<Value> {
    let flows = agent.json(&[&["flows"], filters].concat()).unwrap();
    flows.as_array().unwrap().clone()
}

#[test]
fn held_connections_by_every_filter_and_filters_that_are_wrong() {
    let cluster = Cluster::start(Lab::builder().pods(&[1, 1])).unwrap();
    let backends = cluster.backends();
    cluster.manifests.apply(&Cluster::node_port("web", Policy::Cluster, 30080), &backends[1..]).unwrap();
    cluster.manifests.apply(&Cluster::node_port("near", Policy::Local, 30081), &backends[..1]).unwrap();
    let agent = agent_of_node_1(&cluster);
    wrong_filters_are_named(&agent);
    held_connections_by_every_filter(&cluster, agent);
}

fn agent_of_node_1(cluster: &Cluster) -> Agent {
    let agent = Agent::builder(&cluster.lab, cluster.lab.node(1)).attach("tc").start().unwrap();
    agent.wait_ready(Duration::from_secs(20)).unwrap();
    agent
}

fn held_connections_by_every_filter(cluster: &Cluster, mut agent: Agent) {
    let (client, node) = (cluster.lab.client(), cluster.lab.node(1));
    let pause = Duration::from_millis(100);
    let held: Vec<_> = Family::BOTH
        .into_iter()
        .map(|family| {
            let targets = [30080, 30081].map(|port| cluster.at(1, family, port));
            HeldConnections::start(client.netns(), &targets, 4, pause).unwrap()
        })
        .collect();

    let (pod, near) = (cluster.lab.node(2).pod(1), node.pod(1));
    for family in Family::BOTH {
        let of = client.address(family).to_string();
        let far = list(&agent, &["--service", "default/web", "--client", &of]);
        assert_eq!(far.len(), 2, "{far:?}");
        for flow in &far {
            assert_eq!(flow["service"], "default/web:tcp-80");
            assert_eq!(flow["protocol"], "TCP");
            assert_eq!(flow["kind"], "forwarded");
            assert_eq!(flow["state"], "assured");
            assert_eq!(flow["frontend"], cluster.at(1, family, 30080).to_string());
            let endpoint = std::net::SocketAddr::new(pod.address(family), TARGET);
            assert_eq!(flow["endpoint"], endpoint.to_string());
            let source: std::net::SocketAddr = flow["source"].as_str().unwrap().parse().unwrap();
            assert_eq!(source.ip(), node.address(family), "the node's address towards another node");
            assert!(flow["request_packets"].as_u64().unwrap() >= 2, "{flow}");
            assert!(flow["reply_bytes"].as_u64().unwrap() > 40, "{flow}");
            assert_eq!(flow["device"], "eth0");
            assert_eq!(flow["node"], "node-2");
            let gateway: IpAddr = flow["next_hop"].as_str().unwrap().parse().unwrap();
            assert_eq!(gateway, cluster.lab.node(2).address(family));
            assert!(flow["idle_seconds"].as_f64().unwrap() < 5.0, "{flow}");
            assert_eq!(flow["removed"], false);
        }
        let delivered = list(&agent, &["--endpoint", &near.address(family).to_string()]);
        assert_eq!(delivered.len(), 2, "{delivered:?}");
        for flow in &delivered {
            assert_eq!(flow["kind"], "delivered");
            assert_eq!(flow["source"], flow["client"], "the client's address is kept");
            assert_eq!((&flow["next_hop"], &flow["node"]), (&Value::Null, &Value::Null));
        }
    }
    assert_eq!(list(&agent, &["--client", "192.0.2.0/24", "--state", "assured"]).len(), 4);
    assert_eq!(list(&agent, &["--client", "198.51.100.0/24"]).len(), 0);
    assert_eq!(list(&agent, &["--state", "closing"]).len(), 0);
    assert_eq!(list(&agent, &["--limit", "3"]).len(), 3);
    let table = agent.command(&["flows", "--service", "near"]).unwrap();
    let table = String::from_utf8(table.stdout).unwrap();
    assert_eq!(table.lines().count(), 5, "{table}");
    assert!(table.starts_with("SERVICE ") && table.contains("this node"), "{table}");

    // The flow goes on without an agent, and so does its clock.
    agent.kill().unwrap();
    assert_eq!(list(&agent, &["--state", "assured"]).len(), 8);
    for held in held {
        let report = held.finish();
        assert!(report.is_clean(), "{report}");
    }
    let have_ended = |flows: &Vec<Value>| flows.iter().all(|flow| flow["state"] != "assured");
    look_until("the end of all flows", LIMIT, || list(&agent, &[]), have_ended);
    let idle = || {
        let flows = list(&agent, &[]);
        flows.iter().map(|flow| flow["idle_seconds"].as_f64().unwrap()).fold(f64::INFINITY, f64::min)
    };
    let (start, first) = (Instant::now(), idle());
    until("a second of idle time", LIMIT, || idle() >= first + 1.0);
    let passed = start.elapsed().as_secs_f64();
    assert!(passed > 0.8, "{passed} s made a second of idle time");
}

#[test]
fn a_removed_endpoint_is_a_state() {
    let cluster = Cluster::start(Lab::builder().pods(&[1, 1])).unwrap();
    let backends = cluster.backends();
    let service = Cluster::node_port("web", Policy::Cluster, 30080);
    cluster.manifests.apply(&service, &backends[1..]).unwrap();
    let agent = agent_of_node_1(&cluster);
    let to = cluster.at(1, Family::V4, 30080);
    let held =
        HeldConnections::start(cluster.lab.client().netns(), &[to], 1, Duration::from_millis(100)).unwrap();
    cluster.manifests.endpoints(&service, &backends[..1]).unwrap();
    let look = || [&["--state", "removed"][..], &[]].map(|filter| list(&agent, filter));
    look_until("a removed flow", LIMIT, look, |[removed, _]| removed.len() == 1);
    assert!(held.finish().is_clean());
    cluster.answer(Protocol::Tcp, to).unwrap();
}

fn wrong_filters_are_named(agent: &Agent) {
    for (arguments, code, text) in [
        (&["flows", "--client", "home"][..], 2, "neither an address nor a range"),
        (&["flows", "--state", "open"], 2, "assured"),
        (&["flows", "--endpoint", "pod"], 2, "is no endpoint"),
        (&["flows", "--service", "shop"], 1, "no Service shop is in the maps"),
        (&["services", "shop"], 1, "no Service shop is in the maps"),
        (&["monitor", "--outcome", "lost"], 2, "`lost` is no outcome"),
        (&["monitor", "--for", "soon"], 2, "is not a time"),
        (&["monitor", "--service", "shop"], 1, "no Service shop is in the maps"),
    ] {
        let output = agent.command(arguments).unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {said}");
        assert!(said.contains(text), "{arguments:?}: {said}");
    }
}

/// Fills the IPv4 table with flows of 256 clients, both entries of each, as the packet path would.
fn fill(pin_dir: &Path, flows: u32) {
    let maps = pin_dir.join(format!("v{}/maps", abi::ABI_VERSION));
    let table = Map::from_map_data(MapData::from_pin(maps.join("tp_flows4")).unwrap()).unwrap();
    let mut table: HashMap<_, FlowKey<Address4>, abi::Flow<Address4>> = table.try_into().unwrap();
    assert_eq!(table.keys().count(), 64, "the milestones that the agent has entered");
    let (node, pod) = (Ipv4Addr::new(172, 18, 0, 11).to_wire(), Ipv4Addr::new(10, 244, 2, 2).to_wire());
    for number in 0..flows {
        let client = Ipv4Addr::new(198, 51, 100, number as u8).to_wire();
        let port = (number >> 8) as u16 + 1024;
        let (frontend, target) = (30080, 8080);
        let there = Tuple {
            source: client,
            destination: node,
            ports: Ports::from_host(port, frontend),
            protocol: PROTOCOL_TCP,
        };
        let request = abi::Flow {
            source: client,
            destination: pod,
            ports: Ports::from_host(port, target),
            kind: kind::DELIVER,
            state: ASSURED,
            service: 0,
            packets: abi::Packets::of(3),
            bytes: 180,
            ..abi::Flow::default()
        };
        let back = request.translated(PROTOCOL_TCP).reversed();
        let reply = abi::Flow {
            source: node,
            destination: client,
            ports: Ports::from_host(frontend, port),
            kind: kind::REPLY_LOCAL,
            state: ASSURED | ANSWERED,
            ..request
        };
        table.insert(FlowKey::of(&back), reply, 0).unwrap();
        table.insert(FlowKey::of(&there), request, 0).unwrap();
    }
}

#[test]
fn a_full_table_is_listed_at_once() {
    // As many flows of each client as fit beside the milestones of sweeps.
    const FLOWS: u32 = 511 * 256;
    let cluster = Cluster::start(Lab::builder().pods(&[1])).unwrap();
    cluster.manifests.apply(&Cluster::node_port("web", Policy::Cluster, 30080), &cluster.backends()).unwrap();
    let mut agent = Agent::start_all(&cluster.lab, |agent| agent).unwrap().remove(0);
    // The agent's sweeps would remove flows that have been idle for this long.
    agent.kill().unwrap();
    fill(agent.pin_dir(), FLOWS);
    let start = Instant::now();
    let all = list(&agent, &[]);
    let (took, start) = (start.elapsed(), Instant::now());
    assert_eq!(all.len() as u32, FLOWS);
    assert_eq!(all[0]["reply_packets"], 3, "both entries were found");
    let few = list(&agent, &["--client", "198.51.100.7"]);
    assert_eq!(few.len() as u32, FLOWS / 256);
    println!(
        "{FLOWS} flows in {took:?} with reading the JSON here, {} of them in {:?}",
        few.len(),
        start.elapsed()
    );
    // A debug build is several times slower than a release build, and the machine may be busy.
    assert!(start.elapsed() < scaled(Duration::from_secs(15)), "{:?}", start.elapsed());
    let status = agent.json(&["status"]).unwrap();
    assert_eq!(status["flows"]["entries"][0], 2 * FLOWS);
}
