//! `--notice gce`, `aws` and `azure`, with a metadata server on the node for each.

use std::collections::BTreeSet;

use traffic_policy_testing::cluster::Cluster;
use traffic_policy_testing::lab::Lab;
use traffic_policy_testing::metadata_server::{Cloud, MetadataServer};
use traffic_policy_testing::pace::until;

use crate::fixture::{PATIENCE, body, expect_leaving, expect_staying, web};

/// Starts a node whose agent asks this cloud.
fn node_of(cloud: Cloud, name: &str) -> (Cluster, MetadataServer) {
    let mut cluster = Cluster::start(Lab::builder().pods(&[1])).unwrap();
    cluster.manifests.apply(&web(), &cluster.backends()).unwrap();
    let server = MetadataServer::start(cluster.lab.node(1).netns(), cloud).unwrap();
    let flag = format!("{name}={}", server.url());
    cluster.launch(|builder| builder.flags(&["--notice", &flag])).unwrap();
    (cluster, server)
}

fn check(
    cloud: Cloud,
    name: &str,
    news: &str,
    reason: &str,
    gone_by: Option<&str>,
) -> (Cluster, MetadataServer) {
    let (cluster, server) = node_of(cloud, name);
    let agent = &cluster.agents[0];
    until("a request", PATIENCE, || !server.requests().is_empty());
    expect_staying(&cluster, agent, 1);
    server.set(news);
    let leaving = expect_leaving(&cluster, agent, 1);
    let said = leaving["reason"].as_str().unwrap();
    assert!(said.starts_with(name) && said.ends_with(reason), "{said}");
    if let Some(gone_by) = gone_by {
        assert_eq!(leaving["goneBy"], gone_by);
    } else {
        assert!(leaving["goneBy"].is_string(), "{leaving}");
    }
    // A server that fails takes nothing back, and is named.
    server.set_broken(true);
    let troubled = || {
        let status = agent.json(&["status"]).unwrap();
        let errors = status["agent"]["report"]["errors"].as_object().cloned().unwrap_or_default();
        errors.iter().any(|(subject, error)| subject.contains(name) && error.to_string().contains("500"))
    };
    server.set(news);
    until("the trouble in status", PATIENCE, troubled);
    assert_eq!(agent.healthz().unwrap().status, 503);
    server.set_broken(false);
    server.set("");
    expect_staying(&cluster, agent, 1);
    until("no trouble", PATIENCE, || !troubled());
    let log = agent.log();
    let missed = log.lines().filter_map(|line| line.split_once("may be missed").map(|(_, reason)| reason));
    let missed: Vec<_> = missed.collect();
    let once: BTreeSet<_> = missed.iter().collect();
    assert!(!once.is_empty() && once.len() == missed.len(), "each reason once: {log}");
    (cluster, server)
}

#[test]
fn gce_preempts() {
    let (_cluster, server) = check(Cloud::Gce, "gce", "TRUE", "the instance is being preempted", None);
    // It waits for changes instead of polling: few requests, whatever the time.
    assert!(server.requests().len() < 40, "{:?}", server.requests());
}

#[test]
fn aws_interrupts() {
    let news = r#"{"action": "terminate", "time": "2026-11-24T13:02:00Z"}"#;
    let time = Some("2026-11-24T13:02:00Z");
    let (cluster, server) = check(Cloud::Aws, "aws", news, "Spot interruption: terminate", time);
    // Tokens end; the next request takes another.
    server.forget_tokens();
    server.set(news);
    assert_eq!(expect_leaving(&cluster, &cluster.agents[0], 1)["goneBy"], "2026-11-24T13:02:00Z");
}

#[test]
fn azure_schedules_events() {
    let event = |kind: &str, machine: &str| {
        format!(
            r#"{{"EventId": "1", "EventType": "{kind}", "ResourceType": "VirtualMachine", "Resources": ["{machine}"],
                "EventStatus": "Scheduled", "NotBefore": "Tue, 24 Nov 2026 13:02:00 GMT"}}"#
        )
    };
    let news = format!("{}, {}", event("Preempt", "pool_2"), event("Terminate", "pool_3"));
    let time = Some("2026-11-24T13:02:00Z");
    let (cluster, server) = check(Cloud::Azure, "azure", &news, "scheduled event Terminate", time);
    assert!(server.requests().iter().all(|request| request.starts_with("GET ")), "nothing is approved early");
    // Another machine's event, and one after which this machine goes on, are no news. The agent has
    // seen them when it has asked twice more.
    let asked = || server.requests().iter().filter(|request| request.contains("scheduledevents")).count();
    server.set(&format!("{}, {}", event("Preempt", "pool_2"), event("Freeze", "pool_3")));
    let before = asked();
    until("two requests", PATIENCE, || asked() >= before + 2);
    assert_eq!(body(&cluster.agents[0].healthz().unwrap()).get("leaving"), None);
}
