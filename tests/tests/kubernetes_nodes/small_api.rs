//! Nodes that follow the small API server, which shows the faults of real ones on demand.

use std::net::SocketAddr;
use std::thread::sleep;
use std::time::Duration;

use serde_json::json;
use traffic_policy_testing::agent::Agent;
use traffic_policy_testing::api_server::Kind;
use traffic_policy_testing::cluster::Cluster;
use traffic_policy_testing::control_plane::ControlPlane;
use traffic_policy_testing::lab::{Family, Lab};
use traffic_policy_testing::object::{Backend, Policy, Port, Service};
use traffic_policy_testing::traffic::{NewConnections, Outcome};

use crate::black_box::{POD_PORT, ask, check_cluster, check_health, check_local, until};

const CLUSTER: u16 = 30080;
const LOCAL: u16 = 30081;
const HEALTH: u16 = 32_000;
const PATIENCE: Duration = Duration::from_secs(30);

fn web(name: &str, port: u16) -> Service {
    let ports = [Port::tcp(80, POD_PORT), Port::udp(80, POD_PORT)];
    ports.into_iter().fold(Service::new(name), |service, each| service.port(each.node_port(port)))
}

/// A cluster whose agents follow an API server.
struct ApiCluster {
    cluster: Cluster,
    control_plane: ControlPlane,
    backends: Vec<Backend>,
}

impl ApiCluster {
    /// Starts a cluster with one Service of each policy; the agents are started, but need not be
    /// ready.
    fn start(attach: &str, before_agents: impl FnOnce(&ControlPlane)) -> Self {
        let lab = Lab::builder().pods(&[1, 1, 0]).wire_offloads(attach == "tc");
        let mut cluster = Cluster::start(lab).unwrap();
        let backends = cluster.backends();
        let control_plane = ControlPlane::start(&cluster.lab).unwrap();
        control_plane.apply(&web("cluster", CLUSTER), &backends).unwrap();
        let local = web("local", LOCAL).policy(Policy::Local).health_port(HEALTH);
        control_plane.apply(&local, &backends).unwrap();
        before_agents(&control_plane);
        let start = |node| {
            Agent::builder(&cluster.lab, node).attach(attach).kubeconfig(control_plane.kubeconfig()).start()
        };
        cluster.agents = cluster.lab.nodes().iter().map(|node| start(node).unwrap()).collect();
        Self { cluster, control_plane, backends }
    }

    fn wait_ready(&self) {
        self.cluster.agents.iter().for_each(|agent| agent.wait_ready(PATIENCE).unwrap());
    }
}

fn node_ports_work(attach: &str) {
    let cluster = ApiCluster::start(attach, |_| {});
    cluster.wait_ready();
    check_cluster(&cluster.cluster.lab, CLUSTER, &["pod-1-1", "pod-2-1"]);
    check_local(&cluster.cluster.lab, LOCAL);
    check_health(&cluster.cluster.lab, HEALTH);
}

#[test]
fn node_ports_work_tc() {
    node_ports_work("tc");
}

#[test]
fn node_ports_work_xdp() {
    node_ports_work("xdp");
}

/// A node that knows Services without their endpoints would refuse requests that it should forward.
#[test]
fn nodes_are_ready_only_after_both_lists() {
    for held in [Kind::Service, Kind::EndpointSlice] {
        let cluster = ApiCluster::start("tc", |control_plane| control_plane.server().hold_lists(held));
        let other = if held == Kind::Service { Kind::EndpointSlice } else { Kind::Service };
        until("the lists to be asked for", || {
            cluster.control_plane.server().lists_of(held) >= 3
                && cluster.control_plane.server().lists_of(other) >= 3
        });
        // Nothing may happen: an agent that does not wait for the list would become ready in this
        // time.
        sleep(Duration::from_millis(500));
        for agent in &cluster.cluster.agents {
            assert_eq!(agent.healthz().unwrap().status, 503, "{held:?} have not been listed");
            assert!(!agent.log().contains("first sync"), "{held:?} have not been listed: {}", agent.log());
        }
        // The maps are empty, so only the node itself answers, and it has no such port.
        let outcome = ask(&cluster.cluster.lab, cluster.cluster.lab.node(1), Family::V4, false, CLUSTER);
        assert!(matches!(outcome, Outcome::Refused(_)), "{outcome:?}");
        cluster.control_plane.server().release_lists();
        cluster.wait_ready();
        check_cluster(&cluster.cluster.lab, CLUSTER, &["pod-1-1", "pod-2-1"]);
    }
}

/// The API becomes unavailable, and an agent is even restarted meanwhile: traffic is unaffected.
/// Changes meanwhile are applied when the API is back.
#[test]
fn an_outage_changes_nothing() {
    let mut cluster = ApiCluster::start("xdp", |_| {});
    cluster.wait_ready();
    let target = SocketAddr::new(cluster.cluster.lab.node(3).address(Family::V4), CLUSTER);
    let meter = NewConnections::start(cluster.cluster.lab.client().netns(), 50, move |_| Some(target));
    let syncs = |agent: &Agent| agent.log().matches("synced").count();
    let before: Vec<_> = cluster.cluster.agents.iter().map(syncs).collect();

    cluster.control_plane.go_away();
    cluster.control_plane.endpoints(&web("cluster", CLUSTER), &cluster.backends[..1]).unwrap();
    let new = web("new", 30082);
    cluster.control_plane.apply(&new, &cluster.backends).unwrap();
    // Nothing may happen: the agents meet errors in this time, and traffic goes on.
    sleep(Duration::from_secs(2));
    // One of the agents is killed meanwhile. Its successor has no objects, and so changes nothing.
    cluster.cluster.agents[2].kill().unwrap();
    cluster.cluster.agents[2].start_again().unwrap();
    // The same for the new agent.
    sleep(Duration::from_secs(2));
    assert_eq!(cluster.cluster.agents[2].healthz().unwrap().status, 503, "it cannot know yet");
    assert!(
        cluster.cluster.agents[..2].iter().all(|agent| agent.healthz().unwrap().status == 200),
        "they know enough"
    );
    assert_eq!(before, cluster.cluster.agents.iter().map(syncs).collect::<Vec<_>>());
    check_cluster(&cluster.cluster.lab, CLUSTER, &["pod-1-1", "pod-2-1"]);
    check_local(&cluster.cluster.lab, LOCAL);

    cluster.control_plane.come_back().unwrap();
    cluster.wait_ready();
    until("the new Service", || {
        let asks = |node| ask(&cluster.cluster.lab, node, Family::V4, false, 30082);
        cluster.cluster.lab.nodes().iter().all(|node| matches!(asks(node), Outcome::Answered(_)))
    });
    check_cluster(&cluster.cluster.lab, CLUSTER, &["pod-1-1"]);
    check_cluster(&cluster.cluster.lab, 30082, &["pod-1-1", "pod-2-1"]);
    let report = meter.finish();
    println!("{report}");
    assert!(report.is_clean(), "{report}");
}

/// A fault of a Service is reported in an Event, once by each node; the rest of it is served. A
/// protocol that is not known yet is not a fault, and has no Event.
#[test]
fn a_service_that_is_served_in_part_has_an_event() {
    let cluster = ApiCluster::start("tc", |control_plane| {
        let odd = web("odd", 30083).spec("externalIPs", json!(["203.0.113.300"])).spec(
            "ports",
            json!([
                {"name": "tcp-80", "protocol": "TCP", "port": 80, "nodePort": 30083},
                {"name": "sig", "protocol": "QUIC", "port": 3868, "nodePort": 30868},
            ]),
        );
        control_plane.service(&odd).unwrap();
    });
    cluster.control_plane.endpoints(&web("odd", 30083), &cluster.backends).unwrap();
    cluster.wait_ready();
    let events = || cluster.control_plane.server().posted_events();
    until("an event of each node", || events().len() >= 3);
    until("the other port", || {
        let asks = |node| ask(&cluster.cluster.lab, node, Family::V4, false, 30083);
        cluster.cluster.lab.nodes().iter().all(|node| matches!(asks(node), Outcome::Answered(_)))
    });
    // A write of another change does not repeat the Event.
    cluster.control_plane.apply(&web("new", 30082), &cluster.backends).unwrap();
    until("the new Service", || {
        let asks = |node| ask(&cluster.cluster.lab, node, Family::V4, false, 30082);
        cluster.cluster.lab.nodes().iter().all(|node| matches!(asks(node), Outcome::Answered(_)))
    });
    let events = events();
    assert_eq!(events.len(), 3, "{events:?}");
    for event in events {
        assert_eq!((&event["regarding"]["name"], &event["reason"]), (&json!("odd"), &json!("Misconfigured")));
        let note = event["note"].as_str().unwrap();
        assert!(note.contains("spec.externalIPs") && !note.contains("QUIC"), "{event}");
    }
}

/// Pods that need Services are kept off a node until Services work there.
#[test]
fn the_startup_taint_goes_with_the_first_sync() {
    const KEY: &str = "traffic-policy.io/not-ready";
    let mut cluster = Cluster::start(Lab::builder().pods(&[1])).unwrap();
    let control_plane = ControlPlane::start(&cluster.lab).unwrap();
    control_plane.apply(&web("cluster", CLUSTER), &cluster.backends()).unwrap();
    let server = control_plane.server();
    let name = cluster.lab.node(1).name.clone();
    let mut node = server.object(Kind::Node, "", &name).unwrap();
    node["spec"]["taints"] = json!([
        {"key": KEY, "effect": "NoSchedule"},
        {"key": "other", "value": "kept", "effect": "NoExecute"},
        {"key": KEY, "effect": "NoExecute"},
    ]);
    server.put(node).unwrap();
    let taints = || {
        let node = server.object(Kind::Node, "", &name).unwrap();
        let taints = node["spec"]["taints"].as_array().unwrap();
        taints.iter().map(|taint| taint["key"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    let start = |flags: &[&str]| {
        let builder =
            Agent::builder(&cluster.lab, cluster.lab.node(1)).kubeconfig(control_plane.kubeconfig());
        builder.flags(flags).start().unwrap()
    };
    // The taint is not removed without the flag.
    let mut agent = start(&[]);
    agent.wait_ready(PATIENCE).unwrap();
    agent.stop().unwrap();
    assert_eq!(taints(), [KEY, "other", KEY]);
    // The taint is not removed before the maps are filled; and the role may lack the verb.
    server.hold_lists(Kind::EndpointSlice);
    server.refuse_patches(Some(403));
    let agent = start(&["--remove-startup-taint", KEY]);
    agent.wait_said(&["answering /healthz"], PATIENCE).unwrap();
    // Time enough for a patch if it were not held back: the first attempt is made at once.
    sleep(Duration::from_secs(2));
    assert_eq!(server.requests_with(&format!("PATCH /api/v1/nodes/{name}")), 0);
    server.release_lists();
    agent.wait_said(&["WARN", KEY, "nodes is forbidden", "patch on nodes"], PATIENCE).unwrap();
    assert_eq!(taints(), [KEY, "other", KEY]);
    assert_eq!(agent.livez().unwrap().status, 200);
    server.refuse_patches(None);
    until("the taint is gone", || taints() == ["other"]);
    agent.wait_said(&["the start-up taint", KEY, "is removed from Node"], PATIENCE).unwrap();
    cluster.agents.push(agent);
    check_cluster(&cluster.lab, CLUSTER, &["pod-1-1"]);
}

/// An agent with a wrong API server lives, is not ready, and names the reason: a rollout stops
/// there.
#[test]
fn an_agent_with_a_wrong_api_server_is_not_ready() {
    let cluster = Cluster::start(Lab::builder().pods(&[1])).unwrap();
    let control_plane = ControlPlane::start(&cluster.lab).unwrap();
    control_plane.apply(&web("cluster", CLUSTER), &cluster.backends()).unwrap();
    let right = std::fs::read_to_string(control_plane.kubeconfig()).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let kubeconfig = folder.path().join("kubeconfig");
    // A port on which nothing listens.
    let url = right.split('\'').nth(1).unwrap();
    let (host, _) = url.rsplit_once(':').unwrap();
    std::fs::write(&kubeconfig, right.replace(url, &format!("{host}:1"))).unwrap();
    let agent = Agent::builder(&cluster.lab, cluster.lab.node(1)).kubeconfig(&kubeconfig).start().unwrap();
    agent.wait_said(&["API server", "does not answer"], PATIENCE).unwrap();
    let readyz = agent.readyz().unwrap();
    assert_eq!((readyz.status, agent.livez().unwrap().status), (503, 200), "{}", readyz.body);
    assert!(
        readyz.body.contains("first full sync") && readyz.body.contains("Connection refused"),
        "{}",
        readyz.body
    );
    std::fs::write(&kubeconfig, right).unwrap();
    agent.wait_ready(PATIENCE).unwrap();
    // The Node is drained: load balancers are to leave it, and a rollout is not to wait for it.
    let server = control_plane.server();
    let name = &cluster.lab.node(1).name;
    let mut node = server.object(Kind::Node, "", name).unwrap();
    node["spec"]["taints"] = json!([{"key": "ToBeDeletedByClusterAutoscaler", "effect": "NoSchedule"}]);
    server.put(node).unwrap();
    until("the taint is noticed", || agent.healthz().unwrap().status == 503);
    assert_eq!((agent.readyz().unwrap().status, agent.livez().unwrap().status), (200, 200));
}
