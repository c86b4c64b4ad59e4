use std::net::Ipv4Addr;

use serde_json::Value;

use super::{
    super::listener::tests::{get, localhost},
    *,
};

pub(super) struct Probe {
    server: HealthzServer,
}

impl Probe {
    pub(super) fn new(health: &ProxyHealth) -> Self {
        let any = SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0));
        Self { server: HealthzServer::start(any, health.clone()).unwrap() }
    }

    pub(super) async fn get(&self, path: &str) -> (u16, Value) {
        let answer = get(localhost(self.server.address().port()), path).await;
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        assert!(head.contains("Content-Type: application/json\r\n"), "{head}");
        assert!(head.contains("X-Content-Type-Options: nosniff\r\n"), "{head}");
        (head[9..12].parse().unwrap(), serde_json::from_str(body).unwrap())
    }

    pub(super) async fn statuses(&self) -> (u16, u16) {
        (self.get("/healthz").await.0, self.get("/livez").await.0)
    }
}

/// Advances time until a waiting change is late.
pub(super) fn pass(health: &ProxyHealth) {
    let mut state = health.state();
    let State { queued, beat, .. } = &mut *state;
    for time in [queued, beat].into_iter().flatten() {
        *time = time.checked_sub(LATE).unwrap();
    }
}

#[tokio::test]
async fn from_start_to_late_and_back() {
    let health = ProxyHealth::new(true, true);
    let probe = Probe::new(&health);
    health.set_node_eligible(true);
    assert_eq!(probe.statuses().await, (503, 200), "starting");
    assert!(!health.is_healthy());

    health.synced();
    assert_eq!(probe.statuses().await, (200, 200), "synced");
    pass(&health);
    assert_eq!(probe.statuses().await, (200, 200), "nothing waits");

    health.queued();
    assert!(health.is_healthy(), "not late yet");
    pass(&health);
    health.failed();
    assert_eq!(probe.statuses().await, (503, 200), "late: the oldest change counts, not the last try");
    assert!(!health.is_healthy());

    health.synced();
    assert_eq!(probe.statuses().await, (200, 200), "synced again");
    let answered = Answered { healthz: [(200, 3), (503, 2)], livez: [(200, 5), (503, 0)] };
    assert_eq!(health.answered(), answered);
}

#[tokio::test]
async fn a_loop_that_stands_still_is_not_alive() {
    let health = ProxyHealth::new(true, true);
    let probe = Probe::new(&health);
    health.set_node_eligible(true);
    health.synced();
    pass(&health);
    assert_eq!(probe.statuses().await, (200, 200), "it has not begun");
    health.beat();
    pass(&health);
    assert_eq!(probe.statuses().await, (503, 503));
    health.beat();
    assert!(health.is_healthy());
}

#[tokio::test]
async fn a_node_that_leaves_is_alive_and_says_so() {
    let health = ProxyHealth::new(true, false);
    let probe = Probe::new(&health);
    health.synced();
    let (status, body) = probe.get("/healthz").await;
    assert_eq!(status, 503);
    assert_eq!(body["nodeEligible"], false);
    assert_eq!(body["healthy"], true, "this is about the proxy alone");
    assert_ne!(body["lastUpdated"], body["currentTime"]);
    assert_eq!(body["lastUpdated"], body["status"]["IPv4"]["lastUpdated"]);
    assert!(body["status"].get("IPv6").is_none());
    let (status, body) = probe.get("/livez").await;
    assert_eq!(status, 200);
    assert!(body.get("nodeEligible").is_none());
    assert_eq!(body["lastUpdated"], body["currentTime"]);
}

#[tokio::test]
async fn other_paths_are_unknown() {
    let probe = Probe::new(&ProxyHealth::new(true, true));
    let answer = get(localhost(probe.server.address().port()), "/").await;
    assert!(answer.starts_with("HTTP/1.1 404 Not Found\r\n"), "{answer}");
    assert!(answer.ends_with("404 page not found\n"), "{answer}");
}
