//! Events that an agent posts, and the small number of requests that this takes.

use std::time::Duration;

use tokio::time::{sleep, timeout};
use traffic_policy_cluster::model::ServiceName;
use traffic_policy_cluster::source::{ObjectEvent, Subject};
use traffic_policy_testing::api_server::ApiServer;
use traffic_policy_testing::pace::scaled;

use crate::fixture::{Agent, PATIENCE, service, until};

#[tokio::test]
async fn events_are_posted_about_the_service() {
    let server = ApiServer::start().unwrap();
    server.apply(&service("web", "10.96.0.1")).unwrap();
    let mut agent = Agent::with_kubeconfig(&server).await;
    agent.expect(&["web="]).await;
    let web = ServiceName { namespace: "default".to_owned(), name: "web".to_owned() };
    agent.source.events().post(ObjectEvent::warning(
        Subject::Service(web),
        "FailedToStartServiceHealthcheck",
        "Listen",
        "node here failed".to_owned(),
    ));
    until("the event", || !server.posted_events().is_empty()).await;
    let event = &server.posted_events()[0];
    assert_eq!(event["reason"], "FailedToStartServiceHealthcheck");
    assert_eq!(event["type"], "Warning");
    assert_eq!(event["note"], "node here failed");
    assert_eq!(event["regarding"]["name"], "web");
    assert_eq!(event["regarding"]["uid"], "uid-of-web", "kubectl describe finds events by it");
    assert_eq!(event["metadata"]["namespace"], "default");
}

#[tokio::test]
async fn events_are_posted_about_the_node() {
    let server = ApiServer::start().unwrap();
    let mut agent = Agent::with_kubeconfig(&server).await;
    let post = || {
        let message = "eth0 takes no XDP".to_owned();
        agent.source.events().post(ObjectEvent::normal(Subject::Node, "NoDriverXdp", "Attach", message));
    };
    // The Node is not known yet; kubectl also finds Events that have the name in place of the UID.
    post();
    until("the event", || !server.posted_events().is_empty()).await;
    server.apply("{apiVersion: v1, kind: Node, metadata: {name: here}}").unwrap();
    let known = async {
        while agent.index.nodes().count() == 0 {
            agent.source.next().await.unwrap().apply(&mut agent.index);
        }
    };
    timeout(scaled(PATIENCE), known).await.expect("the Node comes");
    agent.source.events().post(ObjectEvent::warning(
        Subject::Node,
        "ProgramsTakenOff",
        "Attach",
        "off eth0".to_owned(),
    ));
    until("the second event", || server.posted_events().len() == 2).await;
    for (event, uid, kind) in [(0, "here", "Normal"), (1, "uid-of-here", "Warning")] {
        let event = &server.posted_events()[event];
        assert_eq!(event["type"], kind);
        let regarding = &event["regarding"];
        assert_eq!(
            (&regarding["kind"], &regarding["name"], &regarding["uid"]),
            (&"Node".into(), &"here".into(), &uid.into())
        );
    }
}

/// Every node of the cluster sees a tenant who edits one Service in a loop.
#[tokio::test]
async fn a_loop_of_edits_costs_one_event_and_no_list() {
    let server = ApiServer::start().unwrap();
    server.apply(&service("web", "10.96.0.1")).unwrap();
    let mut agent = Agent::with_kubeconfig(&server).await;
    agent.expect(&["web="]).await;
    let bad = |edit: u32| {
        service("web", "10.96.0.1")
            .replace("spec: {", &format!("spec: {{externalTrafficPolicy: Lokal{edit}, "))
    };
    for edit in 0..40 {
        server.apply(&bad(edit)).unwrap();
        // The watch has delivered it.
        agent
            .status(|status| {
                let said = status.errors.get("Services default/web");
                said.is_some_and(|said| said.contains(&format!("Lokal{edit}\"")))
            })
            .await;
    }
    until("the event", || !server.posted_events().is_empty()).await;
    // No more Events may come. Each edit has been seen, and an Event that is not held back is
    // posted at once.
    sleep(Duration::from_millis(500)).await;
    assert_eq!(server.requests_with("/events"), 1, "forty edits");
    assert_eq!(server.requests_with("/namespaces/default/services"), 0);
    assert_eq!(server.posted_events()[0]["regarding"]["uid"], "uid-of-web");
}
