//! Lists and watches, and their faults.

use std::time::Duration;

use tokio::time::timeout;
use traffic_policy_testing::api_server::{ApiServer, Kind, Streaming};
use traffic_policy_testing::pace::scaled;

use crate::fixture::{Agent, PATIENCE, node, service, slice, until};

#[tokio::test]
async fn nothing_is_whole_before_all_lists_have_come() {
    for held in [Kind::Service, Kind::EndpointSlice, Kind::Node, Kind::ServiceCidr] {
        let server = ApiServer::start().unwrap();
        server.apply(&service("web", "10.96.0.1")).unwrap();
        server.apply(&slice("web", &["10.1.0.1"])).unwrap();
        server.hold_lists(held);
        let mut agent = Agent::with_kubeconfig(&server).await;
        for _ in 0..3 {
            timeout(scaled(PATIENCE), agent.source.next()).await.unwrap().unwrap().apply(&mut agent.index);
        }
        agent.expect_silence(Duration::from_millis(300)).await;
        assert!(!agent.index.is_synced(), "{held:?} have not been listed");
        assert!(!agent.source.status().get().synced);
        server.release_lists();
        agent.expect(&["web=10.1.0.1:8080"]).await;
        agent.status(|status| status.synced).await;
    }
}

#[tokio::test]
async fn changes_are_followed() {
    let server = ApiServer::start().unwrap();
    server.apply(&node("here", "192.0.2.10")).unwrap();
    server.apply(&node("there", "192.0.2.11")).unwrap();
    let mut agent = Agent::with_kubeconfig(&server).await;
    agent.expect(&[]).await;
    assert_eq!(agent.index.node_addresses("here").len(), 1);
    assert_eq!(agent.index.node_addresses("there").len(), 0, "only the own Node is watched");
    assert!(agent.index.desired().node_eligible);

    server.apply(&format!("{}---\n{}", service("web", "10.96.0.1"), slice("web", &["10.1.0.1"]))).unwrap();
    agent.expect(&["web=10.1.0.1:8080"]).await;
    server.apply(&slice("web", &["10.1.0.1", "10.1.0.2"])).unwrap();
    agent.expect(&["web=10.1.0.1:8080,10.1.0.2:8080"]).await;
    server.delete(Kind::EndpointSlice, "default", "web-1");
    agent.expect(&["web="]).await;

    let labelled = service("web", "10.96.0.1")
        .replace("{name: web}", "{name: web, labels: {service.kubernetes.io/service-proxy-name: mesh}}");
    server.apply(&labelled).unwrap();
    agent.expect(&[]).await;
    server.apply(&service("web", "10.96.0.1")).unwrap();
    agent.expect(&["web="]).await;
    server.apply(&service("web", "10.96.0.1").replace("clusterIP: 10.96.0.1", "clusterIP: None")).unwrap();
    agent.expect(&[]).await;
    assert_eq!(server.lists_of(Kind::Service), 1, "all of it came by the watch");
    // The server does not even send objects that are not for this proxy: a cluster may have many
    // headless Services. The addresses of Services that another proxy serves must be known, but not
    // their endpoints.
    let headless = "labelSelector=%21service.kubernetes.io%2Fheadless";
    assert!(server.requests_with(headless) >= 2);
    let others = format!("{headless}%2C%21service.kubernetes.io%2Fservice-proxy-name");
    assert!(
        server.requests_with(&others) >= 1 && server.requests_with(&others) < server.requests_with(headless)
    );
}

#[tokio::test]
async fn long_lists_come_in_pages() {
    let server = ApiServer::start().unwrap();
    for i in 0..1_200u16 {
        let [high, low] = i.to_be_bytes();
        server.apply(&service(&format!("s{i:04}"), &format!("10.96.{high}.{low}"))).unwrap();
    }
    let mut agent = Agent::with_kubeconfig(&server).await;
    let all: Vec<_> = (0..1_200).map(|i| format!("s{i:04}=")).collect();
    let mut all: Vec<_> = all.iter().map(String::as_str).collect();
    let seen = agent.expect(&all).await;
    assert!(
        seen.iter().all(|services| services.is_empty() || services.len() == 1_200),
        "a list counts as a whole"
    );
    // Lists from the API server's cache come in one piece; only those that the cache cannot serve
    // come in pages.
    assert_eq!(server.requests_with("continue="), 0);
    server.lag_behind(true);
    server.cut_watches();
    server.delete(Kind::Service, "default", "s0000");
    server.compact();
    all.remove(0);
    let seen = agent.expect(&all).await;
    assert!(seen.iter().all(|services| services.len() == 1_200), "a list counts as a whole");
    assert!(server.requests_with("continue=") >= 2);
}

/// All nodes start together after a power cut: their first lists come from the API server's cache,
/// not from etcd.
#[tokio::test]
async fn first_lists_come_from_the_cache() {
    let expected = [
        (Streaming::Given, "sendInitialEvents=true", 1),
        (Streaming::Refused, "resourceVersion=0&resourceVersionMatch=NotOlderThan", 2),
        (Streaming::Unknown, "resourceVersion=0&resourceVersionMatch=NotOlderThan", 2),
    ];
    for (streaming, first, lists) in expected {
        let server = ApiServer::start().unwrap();
        server.stream_lists(streaming);
        for (name, ip) in [("a", "10.96.0.1"), ("b", "10.96.0.2")] {
            server.apply(&format!("{}---\n{}", service(name, ip), slice(name, &["10.1.0.1"]))).unwrap();
        }
        let mut agent = Agent::with_kubeconfig(&server).await;
        let seen = agent.expect(&["a=10.1.0.1:8080", "b=10.1.0.1:8080"]).await;
        assert!(seen.iter().all(Vec::is_empty) || seen.iter().all(|seen| seen.len() != 1), "{seen:?}");
        assert!(server.requests_with(first) >= 1, "{streaming:?}");
        assert_eq!(server.lists_of(Kind::Service), lists, "{streaming:?}");
        agent.status(|status| status.errors.is_empty()).await;
        // The same holds for versions that the history no longer has; the result is not older than
        // the known state.
        server.cut_watches();
        server.delete(Kind::Service, "default", "a");
        server.compact();
        agent.expect(&["b=10.1.0.1:8080"]).await;
        assert_eq!(server.lists_of(Kind::Service), lists + 1, "{streaming:?}");
        assert_eq!(server.requests_with("limit=500"), 0, "{streaming:?}");
        // A version that the cache does not reach yet is requested from etcd.
        server.lag_behind(true);
        server.cut_watches();
        server.delete(Kind::Service, "default", "b");
        server.compact();
        agent.expect(&[]).await;
        assert!(server.requests_with("limit=500") >= 1, "{streaming:?}");
    }
}

/// An API server may report this by an event of the watch, or refuse the watch.
#[tokio::test]
async fn a_version_that_is_gone_at_the_start_of_a_watch_is_listed_anew() {
    let server = ApiServer::start().unwrap();
    server.refuse_gone_versions();
    for (name, ip) in [("a", "10.96.0.1"), ("b", "10.96.0.2")] {
        server.apply(&service(name, ip)).unwrap();
    }
    let mut agent = Agent::with_kubeconfig(&server).await;
    agent.expect(&["a=", "b="]).await;
    server.cut_watches();
    server.delete(Kind::Service, "default", "a");
    server.compact();
    agent.expect(&["b="]).await;
    assert_eq!(server.lists_of(Kind::Service), 2);
    agent.status(|status| status.errors.is_empty()).await;
}

#[tokio::test]
async fn an_outage_changes_nothing() {
    let mut server = ApiServer::start().unwrap();
    server.apply(&format!("{}---\n{}", service("web", "10.96.0.1"), slice("web", &["10.1.0.1"]))).unwrap();
    let mut agent = Agent::with_kubeconfig(&server).await;
    agent.expect(&["web=10.1.0.1:8080"]).await;

    server.stop().await;
    let status = agent.status(|status| !status.errors.is_empty()).await;
    assert!(status.errors.contains_key("API server"), "{status:?}");
    assert!(status.last_contact.is_some());
    agent.expect_silence(Duration::from_secs(2)).await;
    assert_eq!(agent.services(), ["web=10.1.0.1:8080"]);

    server.apply(&slice("web", &["10.1.0.2"])).unwrap();
    server.restart().await.unwrap();
    let seen = agent.expect(&["web=10.1.0.2:8080"]).await;
    assert!(seen.iter().all(|services| services == &["web=10.1.0.1:8080"]), "{seen:?}");
    agent.status(|status| status.errors.is_empty()).await;
}

#[tokio::test]
async fn what_vanished_unseen_is_removed_by_the_relist() {
    let server = ApiServer::start().unwrap();
    for (name, ip) in [("a", "10.96.0.1"), ("b", "10.96.0.2")] {
        server.apply(&format!("{}---\n{}", service(name, ip), slice(name, &["10.1.0.1"]))).unwrap();
    }
    let mut agent = Agent::with_kubeconfig(&server).await;
    agent.expect(&["a=10.1.0.1:8080", "b=10.1.0.1:8080"]).await;

    // The deletions fall into a time that the history no longer holds: 410 Gone.
    server.cut_watches();
    server.delete(Kind::Service, "default", "a");
    server.delete(Kind::EndpointSlice, "default", "b-1");
    server.compact();
    let seen = agent.expect(&["b="]).await;
    assert_eq!(server.lists_of(Kind::Service), 2);
    assert!(seen.iter().all(|services| services.iter().any(|service| service.starts_with("b="))), "{seen:?}");
    agent.status(|status| status.errors.is_empty()).await;
}

#[tokio::test]
async fn a_cut_watch_goes_on_where_it_was() {
    let server = ApiServer::start().unwrap();
    server.apply(&service("a", "10.96.0.1")).unwrap();
    let mut agent = Agent::with_kubeconfig(&server).await;
    agent.expect(&["a="]).await;
    until("the watches", || server.requests_with("watch=true") >= 4).await;
    // Thanks to the bookmark, the watches have a version that the history still holds. The arrival
    // of a bookmark cannot be observed.
    server.bookmark();
    tokio::time::sleep(Duration::from_millis(300)).await;
    server.compact();
    server.cut_watches();
    server.apply(&service("b", "10.96.0.2")).unwrap();
    agent.expect(&["a=", "b="]).await;
    assert_eq!(server.lists_of(Kind::Service), 1, "no relist was needed");
}

#[tokio::test]
async fn a_bad_object_stops_nobody_else() {
    let server = ApiServer::start().unwrap();
    let impossible = service("never", "10.96.0.9").replace("[{port: 80}]", "yes");
    server.apply(&format!("{}---\n{impossible}", service("a", "10.96.0.1"))).unwrap();
    let mut agent = Agent::with_kubeconfig(&server).await;
    agent.expect(&["a="]).await;
    let status = agent.status(|status| !status.errors.is_empty()).await;
    assert!(status.errors.contains_key("Services default/never"), "{status:?}");
    // The owner of the object is informed, too.
    until("the event", || !server.posted_events().is_empty()).await;
    let event = &server.posted_events()[0];
    assert_eq!(event["regarding"]["name"], "never");
    assert!(event["note"].as_str().unwrap().contains("not understood"), "{event}");

    // A Service that was valid stays as it was, while others change.
    let bad = service("a", "10.96.0.1").replace("spec: {", "spec: {externalTrafficPolicy: Lokal, ");
    server.apply(&bad).unwrap();
    server.apply(&service("b", "10.96.0.2")).unwrap();
    agent.expect(&["a=", "b="]).await;
    let status = agent.status(|status| status.errors.len() == 2).await;
    assert!(status.errors["Services default/a"].contains("spec.externalTrafficPolicy"), "{status:?}");

    // It also survives a relist; and it can be deleted, or corrected.
    server.cut_watches();
    server.apply(&service("c", "10.96.0.3")).unwrap();
    server.compact();
    let seen = agent.expect(&["a=", "b=", "c="]).await;
    assert_eq!(server.lists_of(Kind::Service), 2);
    assert!(seen.iter().all(|services| services.contains(&"a=".to_owned())), "{seen:?}");
    server.delete(Kind::Service, "default", "a");
    server.apply(&service("never", "10.96.0.9")).unwrap();
    agent.expect(&["b=", "c=", "never="]).await;
    agent.status(|status| status.errors.is_empty()).await;
}
