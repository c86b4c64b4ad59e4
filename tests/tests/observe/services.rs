//! `services` shows frontends, policies, phases and endpoints, with and without an agent.

use std::time::Duration;

use serde_json::{Value, json};
use traffic_policy_testing::agent::Agent;
use traffic_policy_testing::cluster::{Cluster, TARGET};
use traffic_policy_testing::lab::{Family, Lab};
use traffic_policy_testing::object::{Policy, Port, Service};
use traffic_policy_testing::pace::look_until;

fn tcp4(agent: &Agent, name: &str) -> Value {
    let ports = agent.json(&["services", name]).unwrap();
    let ports = ports.as_array().unwrap();
    ports.iter().find(|port| port["protocol"] == "TCP" && port["family"] == "IPv4").unwrap().clone()
}

/// The frontend of a kind.
fn frontend<'a>(port: &'a Value, kind: &str) -> &'a Value {
    let frontends = port["frontends"].as_array().unwrap();
    frontends.iter().find(|frontend| frontend["kind"] == kind).unwrap_or_else(|| panic!("no {kind}: {port}"))
}

fn wait_for_phase(agent: &Agent, name: &str, phase: &str) -> Value {
    let is_so = |port: &Value| frontend(port, "NodePort")["phase"] == phase;
    look_until(phase, Duration::from_secs(10), || tcp4(agent, name), is_so)
}

#[test]
fn frontends_endpoints_and_phases_with_a_local_endpoint_and_without() {
    let cluster = Cluster::start(Lab::builder().pods(&[1, 0])).unwrap();
    let backends = cluster.backends();
    let service = |policy| {
        Service::new("web")
            .namespace("shop")
            .policy(policy)
            .port(Port::tcp(80, TARGET).node_port(30080))
            .vip("203.0.113.9".parse().unwrap())
            .annotation("traffic-policy.io/drain", "1h")
            .spec("sessionAffinity", json!("ClientIP"))
            .spec("loadBalancerSourceRanges", json!(["192.0.2.0/24"]))
    };
    cluster.manifests.apply(&service(Policy::Cluster), &backends).unwrap();
    cluster.manifests.apply(&Cluster::node_port("near", Policy::Local, 30081), &backends).unwrap();
    let mut agents = Agent::start_all(&cluster.lab, |agent| agent.attach("tc")).unwrap();
    without_a_local_endpoint_it_says_so(&agents);
    let pod = cluster.lab.node(1).pod(1).address(Family::V4);

    let port = tcp4(&agents[0], "shop/web");
    assert_eq!(
        (&port["namespace"], &port["name"], &port["port"]),
        (&"shop".into(), &"web".into(), &"tcp-80".into())
    );
    assert_eq!((&port["external_policy"], &port["internal_policy"]), (&"Cluster".into(), &"Cluster".into()));
    let here = json!({"address": format!("{pod}:{TARGET}"), "local": true, "node": null, "dispatch": null, "left_out": false, "slots": null});
    assert_eq!(port["endpoints"], json!([here]));
    assert_eq!(port["affinity_seconds"], 10_800, "the default of the API");
    assert_eq!(port["source_ranges"], json!(["192.0.2.0/24"]));
    let vip = frontend(&port, "LoadBalancer");
    assert_eq!((&vip["address"], &vip["policy"]), (&"203.0.113.9:80".into(), &"Cluster".into()));
    let address = cluster.at(1, Family::V4, 30080).to_string();
    let node_port = json!({"kind": "NodePort", "address": address, "policy": "Cluster", "phase": "active", "drain_seconds": null});
    assert!(port["frontends"].as_array().unwrap().contains(&node_port), "{port}");

    // Under Local, node-1 has the endpoint, and node-2 drains.
    cluster.manifests.service(&service(Policy::Local)).unwrap();
    let drained = wait_for_phase(&agents[1], "web", "draining");
    let rest = frontend(&drained, "NodePort")["drain_seconds"].as_f64().unwrap();
    assert!((3_500.0..=3_600.0).contains(&rest), "{rest}");
    assert_eq!(frontend(&drained, "NodePort")["policy"], "Local");
    assert_eq!(drained["local_endpoints"], json!([]));
    let local = wait_for_phase(&agents[0], "web", "active");
    assert_eq!(local["local_endpoints"], json!([here]));
    let status = agents[1].json(&["status"]).unwrap();
    let draining = status["draining"].as_array().unwrap();
    assert!(draining.iter().any(|entry| entry["service"] == "shop/web:tcp-80"), "{status}");
    let table = agents[1].command(&["services"]).unwrap();
    let table = String::from_utf8(table.stdout).unwrap();
    assert!(table.contains("shop/web:tcp-80") && table.contains("draining, 59m"), "{table}");

    // After the agents are killed, the maps give the same answers.
    agents[1].kill().unwrap();
    let later = wait_for_phase(&agents[1], "web", "draining");
    assert!(frontend(&later, "NodePort")["drain_seconds"].as_f64().unwrap() <= rest);
    agents[1].start_again().unwrap();
    agents[1].wait_ready(Duration::from_secs(20)).unwrap();

    cluster.manifests.service(&service(Policy::Local).annotation("traffic-policy.io/drain", "0")).unwrap();
    cluster.manifests.endpoints(&service(Policy::Local), &[]).unwrap();
    wait_for_phase(&agents[0], "web", "rejecting");
    wait_for_phase(&agents[1], "web", "rejecting");
    let details = agents[0].command(&["services", "web"]).unwrap();
    let details = String::from_utf8(details.stdout).unwrap();
    assert!(details.contains("endpoints   none") && details.contains("Local, rejecting"), "{details}");
}

/// One of the nodes has the Service's only endpoint.
fn without_a_local_endpoint_it_says_so(agents: &[Agent]) {
    wait_for_phase(&agents[1], "near", "no-local-endpoint");
    wait_for_phase(&agents[0], "near", "active");
}
