//! Direct forwarding with an API server: agents find each other by Leases, and a node that is taken
//! out gets its requests by SNAT, without a lost one.

mod dispatch;

use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use serde_json::Value;
use traffic_policy_testing::agent::{Agent, AgentBuilder};
use traffic_policy_testing::api_server::Kind;
use traffic_policy_testing::cluster::{Cluster, Protocol, TARGET};
use traffic_policy_testing::control_plane::ControlPlane;
use traffic_policy_testing::lab::{Family, Lab};
use traffic_policy_testing::object::{Port, Service};
use traffic_policy_testing::pace::until;
use traffic_policy_testing::traffic::{HeldConnections, NewConnections};

const NAMESPACE: &str = "traffic-policy-opening";
const FLAGS: [&str; 2] = ["--announce-opening", NAMESPACE];
const NODE_PORT: u16 = 30080;
const PATIENCE: Duration = Duration::from_secs(40);

/// Three nodes, pods on the second and third, agents that follow an API server, and a Service with
/// the annotation.
struct Scene {
    // The fields are dropped in this order.
    cluster: Cluster,
    control_plane: ControlPlane,
}

fn web(forwarding: &str) -> Service {
    let web = Service::new("web").port(Port::tcp(80, TARGET).node_port(NODE_PORT));
    web.annotation("traffic-policy.io/forwarding", forwarding)
}

impl Scene {
    fn start() -> Self {
        Self::with(&[0, 1, 1], &[])
    }

    fn with(pods: &[u8], more: &[&str]) -> Self {
        let cluster = Cluster::start(Lab::builder().pods(pods)).unwrap();
        Self::on(cluster, more, "direct")
    }

    fn on(mut cluster: Cluster, more: &[&str], forwarding: &str) -> Self {
        let control_plane = ControlPlane::start(&cluster.lab).unwrap();
        control_plane.apply(&web(forwarding), &cluster.backends()).unwrap();
        let flags = [&FLAGS, more].concat();
        let scene = |builder: AgentBuilder| builder.kubeconfig(control_plane.kubeconfig()).flags(&flags);
        cluster.launch(scene).unwrap();
        Self { cluster, control_plane }
    }

    fn report(&self, agent: usize) -> Value {
        self.cluster.agents[agent].json(&["status"]).unwrap()["agent"]["report"]["direct"].clone()
    }

    /// Waits until an agent forwards to these other nodes.
    fn expect_nodes(&self, agent: usize, nodes: &[&str]) {
        let what = format!("the agent of node {} forwards directly to {nodes:?}", agent + 1);
        until(&what, PATIENCE, || self.report(agent)["nodes"] == serde_json::json!(nodes));
    }

    fn lease(&self, name: &str) -> Option<Value> {
        self.control_plane.server().object(Kind::Lease, NAMESPACE, name)
    }

    /// The addresses that the pods of both nodes see as the client's.
    fn seen(&self) -> Vec<(String, IpAddr)> {
        let to = self.cluster.at(1, Family::V4, NODE_PORT);
        let answers = (0..20).map(|_| self.cluster.answer(Protocol::Tcp, to).unwrap());
        answers.map(|answer| (answer.node, answer.client.ip())).collect()
    }

    /// Fails unless the pods of `direct` see the client, and all others the node in front.
    fn expect_client_at(&self, direct: &[&str], when: &str) {
        let client = IpAddr::from(self.cluster.lab.client().addresses.v4);
        let front = IpAddr::from(self.cluster.lab.node(1).addresses.v4);
        let seen = self.seen();
        for (node, address) in &seen {
            let expected = if direct.contains(&node.as_str()) { client } else { front };
            assert_eq!(*address, expected, "{when}: {seen:?}");
        }
        for node in ["node-2", "node-3"] {
            assert!(seen.iter().any(|(of, _)| of == node), "{when}: {node} was never chosen");
        }
    }

    fn forwarded_by_snat(&self) -> u64 {
        self.cluster.agents[0].packets("tc-ingress", "forwarded").unwrap()
    }
}

#[test]
fn nodes_come_and_go_without_a_lost_request() {
    let mut scene = Scene::start();
    scene.expect_nodes(0, &["node-2", "node-3"]);
    scene.expect_nodes(1, &["node-1", "node-3"]);
    scene.expect_client_at(&["node-2", "node-3"], "all nodes open packets");
    let lease = scene.lease("traffic-policy-opens-node-2").unwrap();
    assert_eq!(lease["metadata"]["labels"]["traffic-policy.io/opens"], "ipip");
    let addresses = Family::BOTH.map(|family| scene.cluster.lab.node(2).address(family).to_string());
    let opens_from = &lease["metadata"]["annotations"]["traffic-policy.io/opens-from"];
    assert_eq!(*opens_from, addresses.join(","), "{lease}");
    assert_eq!(lease["metadata"]["ownerReferences"][0]["uid"], "uid-of-node-2");
    let renewed = scene.lease("traffic-policy-renewed-node-2").unwrap();
    assert!(renewed["spec"]["renewTime"].is_string() && renewed["metadata"].get("labels").is_none());
    let report = scene.report(1);
    assert!(report["opens"] == true && report["why_not"].is_null(), "{report}");
    let metrics = scene.cluster.agents[0].scrape().unwrap();
    assert_eq!(
        metrics.value("traffic_policy_direct_nodes", &[("dispatch", "ipip")]).unwrap().to_string(),
        "2"
    );
    assert_eq!(
        metrics.value("traffic_policy_direct_nodes", &[("dispatch", "udp")]).unwrap().to_string(),
        "0"
    );
    assert_eq!(scene.report(0)["dispatch"], serde_json::json!({"node-2": "ipip", "node-3": "ipip"}));
    assert_eq!(metrics.value("traffic_policy_direct_opens", &[]).unwrap().to_string(), "1");

    // Agents that are killed and started again take up where they were.
    let by_snat = scene.forwarded_by_snat();
    scene.cluster.agents[..2].iter_mut().for_each(|agent| agent.kill().unwrap());
    scene.expect_client_at(&["node-2", "node-3"], "without two agents");
    scene.cluster.agents[..2].iter_mut().for_each(|agent| agent.start_again().unwrap());
    scene.cluster.agents.iter().for_each(|agent| agent.wait_ready(PATIENCE).unwrap());
    scene.expect_client_at(&["node-2", "node-3"], "after their start");

    // What was last known of the others holds while the API server is away.
    scene.control_plane.go_away();
    scene.cluster.agents[1].stop().unwrap();
    scene.expect_client_at(&["node-2", "node-3"], "without the API server");
    scene.control_plane.come_back().unwrap();
    assert_eq!(scene.forwarded_by_snat(), by_snat, "a flow began as one of SNAT");

    // The programs of node 2 go.
    let to = scene.cluster.at(1, Family::V4, NODE_PORT);
    let meter = NewConnections::start(scene.cluster.lab.client().netns(), 100, move |_| Some(to));
    let refused = scene.cluster.agents[1].command(&["cleanup"]).unwrap();
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && said.contains("give --announce-opening"), "{said}");
    let kubeconfig = scene.control_plane.kubeconfig().display().to_string();
    let told = ["--node-name", "node-2", "--kubeconfig", &kubeconfig];
    let cleaned = scene.cluster.agents[1].command(&[&["cleanup"], &FLAGS[..], &told[..]].concat()).unwrap();
    let said = String::from_utf8_lossy(&cleaned.stderr).into_owned();
    assert!(cleaned.status.success() && said.contains("forward nothing directly to this one"), "{said}");
    assert_eq!(scene.lease("traffic-policy-opens-node-2"), None);
    assert_eq!(scene.lease("traffic-policy-renewed-node-2"), None);
    scene.expect_nodes(0, &["node-3"]);
    scene.expect_client_at(&["node-3"], "without node 2");

    // And come again.
    scene.cluster.agents[1].start_again().unwrap();
    scene.cluster.agents[1].wait_ready(PATIENCE).unwrap();
    scene.expect_nodes(0, &["node-2", "node-3"]);
    let report = meter.finish();
    println!("{report}");
    assert!(report.is_clean() && report.by_pod.len() == 2, "{report}");
    scene.expect_client_at(&["node-2", "node-3"], "node 2 is back");
}

/// All agents are started anew, one after the other; then a node is taken out, and comes again.
fn established_connections_go_on(dispatch: &str) {
    let mut scene = Scene::with(&[0, 1, 1, 0], &["--dispatch", dispatch]);
    scene.expect_nodes(0, &["node-2", "node-3", "node-4"]);
    scene.expect_client_at(&["node-2", "node-3"], "all nodes open packets");
    let to = Family::BOTH.map(|family| scene.cluster.at(1, family, NODE_PORT));
    let client = scene.cluster.lab.client().netns().clone();
    let held = HeldConnections::start(&client, &to, 24, Duration::from_millis(60)).unwrap();
    for agent in &mut scene.cluster.agents {
        agent.stop().unwrap();
        agent.start_again().unwrap();
        agent.wait_ready(PATIENCE).unwrap();
    }
    let kubeconfig = scene.control_plane.kubeconfig().display().to_string();
    let told = ["--node-name", "node-4", "--kubeconfig", &kubeconfig];
    scene.cluster.agents[3].stop().unwrap();
    let cleaned = scene.cluster.agents[3].command(&[&["cleanup"], &FLAGS[..], &told[..]].concat()).unwrap();
    assert!(cleaned.status.success(), "{cleaned:?}");
    scene.expect_nodes(0, &["node-2", "node-3"]);
    scene.cluster.agents[3].start_again().unwrap();
    scene.cluster.agents[3].wait_ready(PATIENCE).unwrap();
    scene.expect_nodes(0, &["node-2", "node-3", "node-4"]);
    let report = held.finish();
    println!("within {dispatch}: {report}");
    assert!(report.broken.is_empty() && report.connections >= 24, "{report}");
    assert_eq!(scene.forwarded_by_snat(), 0, "a connection was one of SNAT");
}

#[test]
fn established_connections_go_on_within_ip() {
    established_connections_go_on("ipip");
}

#[test]
fn established_connections_go_on_within_udp() {
    established_connections_go_on("udp");
}

/// A node whose role lacks the Leases, or that is about to go, gets its packets by SNAT and says
/// why.
#[test]
fn a_node_says_why_it_opens_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("leaving");
    let mut scene = Scene::start();
    scene.expect_nodes(0, &["node-2", "node-3"]);
    let notice = format!("file:{}", path.display());
    scene.cluster.agents[1].stop().unwrap();
    let builder = Agent::builder(&scene.cluster.lab, scene.cluster.lab.node(2));
    let builder = builder.kubeconfig(scene.control_plane.kubeconfig()).flags(&FLAGS);
    scene.cluster.agents[1] = builder.flags(&["--notice", &notice]).start().unwrap();
    scene.cluster.agents[1].wait_ready(PATIENCE).unwrap();
    std::fs::write(&path, "").unwrap();
    scene.expect_nodes(0, &["node-3"]);
    let lease = scene.lease("traffic-policy-opens-node-2").unwrap();
    assert_eq!(lease["metadata"]["labels"]["traffic-policy.io/opens"], "none", "{lease}");
    let status = scene.cluster.agents[1].command(&["status"]).unwrap();
    let status = String::from_utf8_lossy(&status.stdout).into_owned();
    assert!(status.contains("opens no packets of the others: it is about to go"), "{status}");
    std::fs::remove_file(&path).unwrap();
    scene.expect_nodes(0, &["node-2", "node-3"]);

    // Somebody removes the Lease by hand: it is written again.
    scene.control_plane.server().delete(Kind::Lease, NAMESPACE, "traffic-policy-opens-node-3");
    until("the Lease of node 3", PATIENCE, || scene.lease("traffic-policy-opens-node-3").is_some());
    scene.expect_nodes(0, &["node-2", "node-3"]);

    scene.control_plane.server().refuse_patches(Some(403));
    std::fs::write(&path, "").unwrap();
    scene.cluster.agents[1]
        .wait_said(&["WARN", "traffic-policy-opens-node-2", "its role needs"], PATIENCE)
        .unwrap();
    until("the error", PATIENCE, || scene.report(1)["trouble"].is_string());
    let kubeconfig = scene.control_plane.kubeconfig().display().to_string();
    scene.cluster.agents[1].stop().unwrap();
    let told = ["--node-name", "node-2", "--kubeconfig", &kubeconfig];
    let cleaned = scene.cluster.agents[1].command(&[&["cleanup"], &FLAGS[..], &told[..]].concat()).unwrap();
    let said = String::from_utf8_lossy(&cleaned.stderr).into_owned();
    assert!(!cleaned.status.success() && said.contains("nothing is detached"), "{said}");
    scene.expect_client_at(&["node-2", "node-3"], "node 2 still opens packets");
}

/// A Service port without a Maglev table is served at random, and its packets are opened all the
/// same. Other nodes do not leave the choice of its endpoint to this one.
#[test]
fn a_node_without_room_for_maglev_tables_opens_packets() {
    let one_table = ["--algorithm", "maglev", "--maglev-size", "251", "--maglev-entries", "64"];
    let scene = Scene::with(&[0, 1, 1], &one_table);
    for agent in &scene.cluster.agents {
        agent.wait_said(&["WARN", "the maps have no room for", "--maglev-entries"], PATIENCE).unwrap();
    }
    scene.expect_nodes(0, &["node-2", "node-3"]);
    scene.expect_client_at(&["node-2", "node-3"], "one of two tables is missing");
    let lease = scene.lease("traffic-policy-opens-node-2").unwrap();
    assert_eq!(lease["metadata"]["labels"]["traffic-policy.io/opens"], "ipip");
    let choice = lease["metadata"]["annotations"]["traffic-policy.io/opens-l2-by"].as_str().unwrap();
    assert!(choice.ends_with(" not-all-tables"), "{choice}");
}

/// A node that has nearly as many addresses as there is room for beside the others: it is left out,
/// and no write fails. All agents say that they open nothing, since it may send to them.
#[test]
fn nodes_without_room_fail_no_write() {
    let scene = Scene::start();
    scene.expect_nodes(0, &["node-2", "node-3"]);
    let addresses: Vec<_> =
        (0..16_382).map(|number| Ipv4Addr::from(0x0ac8_0000 + number).to_string()).collect();
    let server = scene.control_plane.server();
    let crowd = serde_json::json!({
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {
            "namespace": NAMESPACE,
            "name": "traffic-policy-opens-crowd",
            "labels": {"traffic-policy.io/opens": "ipip"},
            "annotations": {"traffic-policy.io/opens-from": addresses.join(",")},
        },
        "spec": {"holderIdentity": "crowd"},
    });
    server.put(crowd).unwrap();
    for (number, agent) in (1..).zip(&scene.cluster.agents) {
        agent.wait_said(&["WARN", "no room for the addresses of crowd"], PATIENCE).unwrap();
        until(&format!("node-{number} opens nothing"), PATIENCE, || {
            let lease = scene.lease(&format!("traffic-policy-opens-node-{number}")).unwrap();
            lease["metadata"]["labels"]["traffic-policy.io/opens"] == "none"
        });
        let metrics = agent.scrape().unwrap();
        let of = |name: &str, labels: &[(&str, &str)]| metrics.value(name, labels).unwrap();
        let map = [("map", "direct-nodes"), ("ip_family", "IPv4")];
        assert!((of("traffic_policy_map_entries", &map) - 2.0).abs() < 0.1, "those that are known stay");
        assert!((of("traffic_policy_map_max_entries", &map) - 16_383.0).abs() < 0.1);
        let macs = of("traffic_policy_map_entries", &[("map", "direct-macs")]);
        assert!((macs - 2.0).abs() < 0.1, "one of each other node: {macs}");
        // Of writes that fail the time since the first one grows; one that is under way ends.
        until(&format!("node-{number} is in sync"), PATIENCE, || {
            let metrics = agent.scrape().unwrap();
            metrics.value("traffic_policy_out_of_sync_seconds", &[]).unwrap() == 0.0
        });
    }
    let report = scene.report(0);
    let why = report["why_not"].as_str().unwrap();
    assert!(why.contains("no room for the addresses of all nodes"), "{report}");
    let by_snat = report["by_snat"].as_array().unwrap();
    assert!(by_snat.iter().any(|node| node == "crowd"), "{report}");
    server.delete(Kind::Lease, NAMESPACE, "traffic-policy-opens-crowd");
    scene.expect_nodes(0, &["node-2", "node-3"]);
    scene.expect_client_at(&["node-2", "node-3"], "there is room again");
}
