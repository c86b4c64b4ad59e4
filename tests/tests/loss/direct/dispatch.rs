//! `--dispatch auto` in networks that do not let everything pass: nodes ask each other what does,
//! and no request is lost, neither before they know nor when an agent starts again.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use serde_json::json;
use traffic_policy_testing::capture::Capture;
use traffic_policy_testing::cluster::{Cluster, Protocol, TARGET};
use traffic_policy_testing::lab::{Family, Lab};
use traffic_policy_testing::object::{Port, Service};
use traffic_policy_testing::traffic::{HeldConnections, NewConnections};

use super::{NODE_PORT, PATIENCE, Scene, until, web};

const NO_IP: &str = "ip protocol 4 drop\nip6 nexthdr 41 drop";
const NO_UDP: &str = "udp dport 6080 drop";
const OTHERS: [&str; 2] = ["node-2", "node-3"];

/// Forbids between the nodes what these rules say.
fn forbid(cluster: &Cluster, rules: &str) {
    let devices: Vec<_> = cluster.lab.nodes().iter().map(|node| format!("\"{}\"", node.name)).collect();
    let devices = devices.join(", ");
    let table = format!(
        "table netdev cloud {{\n chain c {{ type filter hook ingress devices = {{ {devices} }} priority 0; policy accept;\n{rules}\n }}\n}}\n"
    );
    cluster.lab.router().feed("nft", &["-f", "-"], &table).unwrap();
}

fn allow(cluster: &Cluster) {
    cluster.lab.router().feed("nft", &["-f", "-"], "delete table netdev cloud\n").unwrap();
}

/// Three nodes, whose agents start in a network with these rules, and a Service.
fn start_behind(rules: &str, forwarding: &str) -> Scene {
    let cluster = Cluster::start(Lab::builder().pods(&[0, 1, 1])).unwrap();
    forbid(&cluster, rules);
    Scene::on(cluster, &[], forwarding)
}

impl Scene {
    fn expect_dispatch(&self, dispatch: &str) {
        let all = json!({OTHERS[0]: dispatch, OTHERS[1]: dispatch});
        until(&format!("packets travel within {dispatch}"), PATIENCE, || {
            self.report(0)["dispatch"] == all && self.report(0)["waits"] == false
        });
    }

    /// Waits until both other nodes have been asked, and this is what gets there.
    fn expect_answers(&self, text: &str) {
        until(&format!("to both nodes gets {text}"), PATIENCE, || {
            let report = self.report(0);
            let said = |node: &str| report["lacking"][node].as_str().is_some_and(|said| said.contains(text));
            report["waits"] == false && OTHERS.iter().all(|node| said(node))
        });
    }

    fn new_connections(&self) -> NewConnections {
        let to = self.cluster.at(1, Family::V4, NODE_PORT);
        NewConnections::start(self.cluster.lab.client().netns(), 50, move |_| Some(to))
    }

    fn start_agent_again(&mut self) {
        self.cluster.agents[0].kill().unwrap();
        self.cluster.agents[0].start_again().unwrap();
        self.cluster.agents[0].wait_ready(PATIENCE).unwrap();
    }
}

#[test]
fn udp_where_ip_within_ip_does_not_pass() {
    let mut scene = start_behind(NO_IP, "snat");
    let meter = scene.new_connections();
    until("this node is known", PATIENCE, || scene.report(0)["waits"] == false);
    // Nobody has been asked by the time of the first Service that is forwarded directly.
    scene.control_plane.apply(&web("direct"), &scene.cluster.backends()).unwrap();
    scene.expect_dispatch("udp");
    scene.expect_client_at(&OTHERS, "within UDP");
    let by_snat = scene.forwarded_by_snat();
    scene.start_agent_again();
    scene.expect_client_at(&OTHERS, "after a start");
    scene.expect_answers("IPv4: within UDP, not IP");
    scene.expect_dispatch("udp");
    scene.expect_client_at(&OTHERS, "once the nodes were asked again");
    assert_eq!(scene.forwarded_by_snat(), by_snat, "a flow began as one of SNAT");
    let report = meter.finish();
    assert!(report.is_clean() && report.by_pod.len() == 2, "{report}");
    let said = scene.cluster.agents[0].command(&["status"]).unwrap();
    let said = String::from_utf8_lossy(&said.stdout).into_owned();
    assert!(
        said.contains("within udp by node-2, node-3; not all gets to node-2 (IPv4: within UDP, not IP"),
        "{said}"
    );
}

#[test]
fn snat_where_nothing_passes_until_something_does() {
    let mut scene = start_behind(&format!("{NO_IP}\n{NO_UDP}"), "direct");
    let meter = scene.new_connections();
    scene.expect_answers("IPv4: not at all");
    scene.expect_client_at(&[], "nothing passes");
    scene.start_agent_again();
    scene.expect_client_at(&[], "after a start");
    scene.expect_answers("IPv4: not at all");
    allow(&scene.cluster);
    scene.expect_dispatch("ipip");
    scene.expect_client_at(&OTHERS, "all passes");
    let report = meter.finish();
    assert!(report.is_clean() && report.by_pod.len() == 2, "{report}");
}

/// A network that lets no node send from another's address: `direct` uses SNAT, and `tunnel` works.
#[test]
fn what_passes_decides_for_each_forwarding_by_itself() {
    let cluster = Cluster::start(Lab::builder().pods(&[0, 1, 1])).unwrap();
    let vip: IpAddr = "203.0.113.9".parse().unwrap();
    let front = cluster.lab.node(1).address(Family::V4);
    let foreign =
        OTHERS.map(|device| format!("iifname \"{device}\" ip saddr {{ {vip}, {front} }} drop")).join("\n");
    forbid(&cluster, &foreign);
    let scene = Scene::on(cluster, &[], "direct");
    let web = |forwarding| web(forwarding).vip(vip).families(&[Family::V4]);
    let meter = scene.new_connections();
    scene.control_plane.apply(&web("direct"), &scene.cluster.backends()).unwrap();
    let lacking = "IPv4: not at all, and with replies through this node within IP and UDP";
    until("no answer of the VIP arrives", PATIENCE, || {
        let report = scene.report(0);
        OTHERS.iter().all(|node| report["lacking"][node] == lacking)
    });
    scene.expect_client_at(&[], "direct");
    scene.control_plane.apply(&web("tunnel"), &scene.cluster.backends()).unwrap();
    until("the client is seen", PATIENCE, || {
        let client = IpAddr::from(scene.cluster.lab.client().addresses.v4);
        scene.seen().iter().all(|(_, address)| *address == client)
    });
    let report = meter.finish();
    assert!(report.is_clean() && report.by_pod.len() == 2, "{report}");
}

const VIPS: [&str; 2] = ["203.0.113.9", "2001:db8:113::9"];
/// The time in which all nodes have heard of a Service, 60 to 80 s, and been asked.
const HEARD: Duration = Duration::from_secs(150);

/// The words of `services` for the endpoints of IPv4 and of IPv6, on a node without one.
fn served(scene: &Scene, agent: usize, service: &str) -> [String; 2] {
    let ports = scene.cluster.agents[agent].json(&["services", service]).unwrap();
    let ports = ports.as_array().unwrap();
    [false, true].map(|ipv6| {
        let is_one = |address: &str| address.contains('[') == ipv6;
        let port = ports.iter().find(|port| is_one(port["frontends"][0]["address"].as_str().unwrap()));
        port.unwrap_or_else(|| panic!("{ports:?}")).to_string()
    })
}

/// Packets go to a node's MAC address as they are once all nodes know the Service for long enough,
/// if one that is sent so is answered; where a switch looks at
/// destinations (in IPv6 here), within outer packets. Connections outlive the change, a new start
/// of all agents, and a router that moves them to another node.
#[test]
fn by_mac_address_once_all_nodes_have_heard() {
    let cluster = Cluster::start(Lab::builder().pods(&[0, 1, 1, 0])).unwrap();
    forbid(&cluster, &format!("ip6 daddr {} drop", VIPS[1]));
    let vips = VIPS.map(|vip| vip.parse::<IpAddr>().unwrap());
    let mut scene = Scene::on(cluster, &["--algorithm", "maglev", "--maglev-size", "251"], "direct");
    let service = vips.into_iter().fold(web("direct"), Service::vip);
    scene.control_plane.apply(&service, &scene.cluster.backends()).unwrap();
    let route_to = |scene: &Scene, number: usize| {
        vips.iter()
            .for_each(|vip| scene.cluster.lab.route_vip(*vip, scene.cluster.lab.node(number)).unwrap());
    };
    route_to(&scene, 1);
    until("packets travel within IP", PATIENCE, || {
        let report = scene.report(0);
        report["waits"] == false && OTHERS.iter().all(|node| report["dispatch"][node] == "ipip")
    });
    let to = vips.map(|vip| SocketAddr::new(vip, 80));
    let client = scene.cluster.lab.client().netns().clone();
    let held = HeldConnections::start(&client, &to, 24, Duration::from_millis(100)).unwrap();
    println!("{:?}", served(&scene, 0, "default/web"));
    let is_by_mac = |scene: &Scene, agent: usize, service: &str| {
        served(scene, agent, service).map(|text| text.contains("\"l2\""))
    };
    assert_eq!(is_by_mac(&scene, 0, "default/web"), [false; 2], "others may not know the Service yet");
    for agent in [0, 3] {
        until("packets go by MAC address", HEARD, || {
            is_by_mac(&scene, agent, "default/web") == [true, false]
        });
    }
    println!("{:?}", served(&scene, 0, "default/web"));
    let capture = Capture::start(scene.cluster.lab.node(2).netns(), "eth0").unwrap();
    for _ in 0..20 {
        assert!(scene.cluster.answer(Protocol::Tcp, to[0]).is_ok());
    }
    let IpAddr::V4(vip) = vips[0] else { unreachable!() };
    let front = scene.cluster.lab.node(1).addresses.mac();
    let frames = capture.finish_valid().unwrap();
    let own = frames.iter().filter(|frame| {
        // From the node in front, to the VIP itself.
        frame.bytes[6..12] == front && frame.bytes[12..14] == [8, 0] && frame.bytes[30..34] == vip.octets()
    });
    assert!(own.count() > 0, "no packet came as it is");

    // What was known before goes on; a Service that is new waits.
    for agent in 0..4 {
        scene.cluster.agents[agent].kill().unwrap();
        scene.cluster.agents[agent].start_again().unwrap();
        scene.cluster.agents[agent].wait_ready(PATIENCE).unwrap();
        if [0, 3].contains(&agent) {
            assert_eq!(is_by_mac(&scene, agent, "default/web"), [true, false], "after a start");
        }
    }
    let other = Service::new("other")
        .port(Port::tcp(81, TARGET))
        .annotation("traffic-policy.io/forwarding", "direct");
    scene.control_plane.apply(&other, &scene.cluster.backends()).unwrap();
    until("the new Service is served", PATIENCE, || {
        scene.cluster.agents[0]
            .json(&["services", "default/other"])
            .is_ok_and(|ports| ports.to_string().contains("ipip"))
    });
    assert_eq!(is_by_mac(&scene, 0, "default/other"), [false; 2], "a new Service");
    route_to(&scene, 4);
    // Each connection has twenty requests by the other node: what is cut is seen then.
    std::thread::sleep(Duration::from_secs(2));
    let report = held.finish();
    println!("{report}");
    assert!(report.broken.is_empty() && report.connections >= 24, "{report}");
    assert!(
        report.clients.iter().all(|seen| {
            [Family::V4, Family::V6].iter().any(|family| *seen == scene.cluster.lab.client().address(*family))
        }),
        "{:?}",
        report.clients
    );
}

/// A chosen dispatch is used as it is, and nobody is asked: the agent needs no raw packets then.
#[test]
fn what_was_chosen_is_not_asked_for() {
    let scene = Scene::with(&[0, 1, 1], &["--dispatch", "udp"]);
    scene.expect_dispatch("udp");
    let pid = scene.cluster.agents[0].pid().unwrap();
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let held = status.lines().find_map(|line| line.strip_prefix("CapPrm:")).unwrap();
    let held = u64::from_str_radix(held.trim(), 16).unwrap();
    assert_eq!(held >> 13 & 1, 0, "CAP_NET_RAW is kept: {held:x}");
    assert_eq!(scene.report(0)["lacking"], json!({}));
}
