//! `--dispatch auto` in networks that do not let everything pass: nodes ask each other what does,
//! and no request is lost, neither before they know nor when an agent starts again.

use std::net::IpAddr;

use serde_json::json;
use traffic_policy_testing::cluster::Cluster;
use traffic_policy_testing::lab::{Family, Lab};
use traffic_policy_testing::traffic::NewConnections;

use super::{NODE_PORT, PATIENCE, Scene, until, web};

const NO_IP: &str = "ip protocol 4 drop\nip6 nexthdr 41 drop";
const NO_UDP: &str = "udp dport 6080 drop";
const OTHERS: [&str; 2] = ["node-2", "node-3"];

/// Forbids between the nodes what these rules say.
fn forbid(cluster: &Cluster, rules: &str) {
    let devices = "\"node-1\", \"node-2\", \"node-3\"";
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
