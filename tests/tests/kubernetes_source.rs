//! The Kubernetes source against an API server with the faults of real ones.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::{fs, time::Duration};

use tempfile::TempDir;
use tokio::time::timeout;
use traffic_policy_agent::{
    model::{Index, NodeInput, ServiceName},
    source::{Access, Kubernetes, ServiceEvent, Source, Status},
};
use traffic_policy_tests::api_server::{ApiServer, Certificate, Kind};

/// Longer than the source's longest pause between two tries that a test waits for.
const PATIENCE: Duration = Duration::from_secs(30);

fn service(name: &str, ip: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Service\nmetadata: {{name: {name}}}\n\
         spec: {{clusterIP: {ip}, ports: [{{port: 80}}]}}\n"
    )
}

fn slice(service: &str, addresses: &[&str]) -> String {
    let endpoints: Vec<_> =
        addresses.iter().map(|ip| format!("{{addresses: ['{ip}'], nodeName: here}}")).collect();
    format!(
        "apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\n\
         metadata: {{name: {service}-1, labels: {{kubernetes.io/service-name: {service}}}}}\n\
         addressType: IPv4\nports: [{{port: 8080}}]\nendpoints: [{}]\n",
        endpoints.join(", ")
    )
}

fn node(name: &str, ip: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Node\nmetadata: {{name: {name}}}\n\
         status: {{addresses: [{{type: InternalIP, address: {ip}}}]}}\n"
    )
}

/// An agent's view of the API: what it believes at the moment.
struct Agent {
    source: Source,
    index: Index,
    _files: TempDir,
}

impl Agent {
    async fn with_kubeconfig(server: &ApiServer) -> Self {
        let files = tempfile::tempdir().unwrap();
        let path = files.path().join("kubeconfig");
        server.write_kubeconfig(&path).unwrap();
        Self::start(Access::Kubeconfig(path), files).await
    }

    async fn in_cluster(server: &ApiServer, token: &str) -> Self {
        let files = tempfile::tempdir().unwrap();
        fs::write(files.path().join("token"), token).unwrap();
        let service_account = files.path().to_owned();
        Self::start(Access::InCluster { api_server: Some(server.url()), service_account }, files).await
    }

    async fn start(access: Access, files: TempDir) -> Self {
        let source = Kubernetes { access, node_name: "here".to_owned() }.start().await.unwrap();
        Self { source, index: Index::default(), _files: files }
    }

    /// Each Service with its endpoints, as `name=endpoint,endpoint`.
    fn services(&mut self) -> Vec<String> {
        let input = NodeInput { node_name: "here".to_owned(), ipv4: true, ..NodeInput::default() };
        let _ = self.index.update(&input);
        let ports = self.index.desired().ports.iter();
        ports
            .map(|(key, port)| {
                let endpoints: Vec<_> =
                    port.cluster.iter().map(|endpoint| endpoint.address.to_string()).collect();
                format!("{}={}", key.service.name, endpoints.join(","))
            })
            .collect()
    }

    /// Waits until the agent believes this. What it believed on the way is returned.
    async fn expect(&mut self, wanted: &[&str]) -> Vec<Vec<String>> {
        let mut seen = Vec::new();
        let waiting = async {
            loop {
                let services = self.services();
                if services == wanted && self.index.is_synced() {
                    return;
                }
                seen.push(services);
                self.source.next().await.expect("the source goes on").apply(&mut self.index);
            }
        };
        let arrived = timeout(PATIENCE, waiting).await;
        assert!(
            arrived.is_ok(),
            "expected {wanted:?}, seen {seen:?}, status {:?}",
            self.source.status().get()
        );
        seen
    }

    /// Nothing more comes within this time.
    async fn expect_silence(&mut self, time: Duration) {
        if let Ok(batch) = timeout(time, self.source.next()).await {
            panic!("unexpected: {batch:?}");
        }
    }

    async fn status(&self, condition: impl FnMut(&Status) -> bool) -> Status {
        let mut status = self.source.status();
        let now = status.get();
        timeout(PATIENCE, status.wait_for(condition))
            .await
            .unwrap_or_else(|_| panic!("status {now:?}"))
            .unwrap()
    }
}

async fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let waiting = async {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(PATIENCE, waiting).await.unwrap_or_else(|_| panic!("waited for {what} in vain"));
}

#[tokio::test]
async fn nothing_is_whole_before_all_lists_have_come() {
    for held in [Kind::Service, Kind::EndpointSlice, Kind::Node, Kind::ServiceCidr] {
        let server = ApiServer::start().unwrap();
        server.apply(&service("web", "10.96.0.1")).unwrap();
        server.apply(&slice("web", &["10.1.0.1"])).unwrap();
        server.hold_lists(held);
        let mut agent = Agent::with_kubeconfig(&server).await;
        for _ in 0..3 {
            timeout(PATIENCE, agent.source.next()).await.unwrap().unwrap().apply(&mut agent.index);
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
    // What is not for this proxy is not even sent: a cluster may have many headless Services.
    let selector =
        "labelSelector=%21service.kubernetes.io%2Fheadless%2C%21service.kubernetes.io%2Fservice-proxy-name";
    assert!(server.requests_with(selector) >= 4);
}

fn service_cidr(name: &str, cidrs: &str) -> String {
    format!(
        "apiVersion: networking.k8s.io/v1\nkind: ServiceCIDR\nmetadata: {{name: {name}}}\nspec: {{cidrs: [{cidrs}]}}\n"
    )
}

#[tokio::test]
async fn service_cidrs_are_followed() {
    let server = ApiServer::start().unwrap();
    server.apply(&service_cidr("kubernetes", "10.96.0.0/16, 'fd00:10:96::/112'")).unwrap();
    let mut agent = Agent::with_kubeconfig(&server).await;
    let expect = async |agent: &mut Agent, wanted: &[&str]| {
        let waiting = async {
            loop {
                agent.services();
                let cidrs = &agent.index.desired().service_cidrs;
                if cidrs.iter().map(ToString::to_string).collect::<Vec<_>>() == wanted {
                    return;
                }
                agent.source.next().await.expect("the source goes on").apply(&mut agent.index);
            }
        };
        assert!(timeout(PATIENCE, waiting).await.is_ok(), "{wanted:?}: {:?}", agent.index.desired());
    };
    expect(&mut agent, &["10.96.0.0/16", "fd00:10:96::/112"]).await;
    server.apply(&service_cidr("more", "10.97.0.0/16")).unwrap();
    expect(&mut agent, &["10.96.0.0/16", "10.97.0.0/16", "fd00:10:96::/112"]).await;
    server.delete(Kind::ServiceCidr, "", "kubernetes");
    expect(&mut agent, &["10.97.0.0/16"]).await;
}

/// An API server older than the resource, and a role that does not name it.
#[tokio::test]
async fn an_api_without_service_cidrs_is_followed_all_the_same() {
    for status in [403, 404] {
        let server = ApiServer::start().unwrap();
        server.refuse(Kind::ServiceCidr, status);
        server
            .apply(&format!("{}---\n{}", service("web", "10.96.0.1"), slice("web", &["10.1.0.1"])))
            .unwrap();
        let mut agent = Agent::with_kubeconfig(&server).await;
        agent.expect(&["web=10.1.0.1:8080"]).await;
        let status = agent.status(|status| status.synced).await;
        assert!(status.troubles.is_empty(), "{status:?}");
        // Each node asks, so asking often would be a load.
        tokio::time::sleep(Duration::from_secs(3)).await;
        assert_eq!(server.lists_of(Kind::ServiceCidr), 1);
    }
    // What every API server has, and every proxy may see, is waited for.
    let server = ApiServer::start().unwrap();
    server.refuse(Kind::Service, 403);
    let mut agent = Agent::with_kubeconfig(&server).await;
    let status = agent.status(|status| status.troubles.contains_key("Services")).await;
    assert!(status.troubles["Services"].contains("403"), "{status:?}");
    while let Some(batch) = agent.source.try_next() {
        batch.apply(&mut agent.index);
    }
    assert!(!agent.index.is_synced());
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
    let seen = agent.expect(&all.iter().map(String::as_str).collect::<Vec<_>>()).await;
    assert!(
        seen.iter().all(|services| services.is_empty() || services.len() == 1_200),
        "a list counts as a whole"
    );
    assert!(server.requests_with("continue=") >= 2);
}

#[tokio::test]
async fn an_outage_changes_nothing() {
    let mut server = ApiServer::start().unwrap();
    server.apply(&format!("{}---\n{}", service("web", "10.96.0.1"), slice("web", &["10.1.0.1"]))).unwrap();
    let mut agent = Agent::with_kubeconfig(&server).await;
    agent.expect(&["web=10.1.0.1:8080"]).await;

    server.stop().await;
    let status = agent.status(|status| !status.troubles.is_empty()).await;
    assert!(status.troubles.contains_key("API server"), "{status:?}");
    assert!(status.last_contact.is_some());
    agent.expect_silence(Duration::from_secs(2)).await;
    assert_eq!(agent.services(), ["web=10.1.0.1:8080"]);

    server.apply(&slice("web", &["10.1.0.2"])).unwrap();
    server.restart().await.unwrap();
    let seen = agent.expect(&["web=10.1.0.2:8080"]).await;
    assert!(seen.iter().all(|services| services == &["web=10.1.0.1:8080"]), "{seen:?}");
    agent.status(|status| status.troubles.is_empty()).await;
}

#[tokio::test]
async fn an_api_that_comes_late_is_waited_for() {
    let mut server = ApiServer::start().unwrap();
    server.apply(&service("web", "10.96.0.1")).unwrap();
    server.stop().await;
    let mut agent = Agent::with_kubeconfig(&server).await;
    let status = agent.status(|status| !status.troubles.is_empty()).await;
    assert!(status.troubles["API server"].contains("refused"), "{status:?}");
    assert!(!agent.index.is_synced());
    server.restart().await.unwrap();
    agent.expect(&["web="]).await;
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
    agent.status(|status| status.troubles.is_empty()).await;
}

#[tokio::test]
async fn a_cut_watch_goes_on_where_it_was() {
    let server = ApiServer::start().unwrap();
    server.apply(&service("a", "10.96.0.1")).unwrap();
    let mut agent = Agent::with_kubeconfig(&server).await;
    agent.expect(&["a="]).await;
    until("the watches", || server.requests_with("watch=true") >= 4).await;
    // Thanks to the bookmark they know a version that the history still holds.
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
    let status = agent.status(|status| !status.troubles.is_empty()).await;
    assert!(status.troubles.contains_key("Services default/never"), "{status:?}");
    // Its owner is told, too.
    until("the event", || !server.posted_events().is_empty()).await;
    let event = &server.posted_events()[0];
    assert_eq!(event["regarding"]["name"], "never");
    assert!(event["note"].as_str().unwrap().contains("not understood"), "{event}");

    // One that was good stays as it was, while others change.
    let bad = service("a", "10.96.0.1").replace("spec: {", "spec: {externalTrafficPolicy: Lokal, ");
    server.apply(&bad).unwrap();
    server.apply(&service("b", "10.96.0.2")).unwrap();
    agent.expect(&["a=", "b="]).await;
    let status = agent.status(|status| status.troubles.len() == 2).await;
    assert!(status.troubles["Services default/a"].contains("spec.externalTrafficPolicy"), "{status:?}");

    // Also over a relist; and it can be deleted, or mended.
    server.cut_watches();
    server.apply(&service("c", "10.96.0.3")).unwrap();
    server.compact();
    let seen = agent.expect(&["a=", "b=", "c="]).await;
    assert_eq!(server.lists_of(Kind::Service), 2);
    assert!(seen.iter().all(|services| services.contains(&"a=".to_owned())), "{seen:?}");
    server.delete(Kind::Service, "default", "a");
    server.apply(&service("never", "10.96.0.9")).unwrap();
    agent.expect(&["b=", "c=", "never="]).await;
    agent.status(|status| status.troubles.is_empty()).await;
}

#[tokio::test]
async fn a_rotated_token_is_used_at_once() {
    let server = ApiServer::start().unwrap();
    server.require_tokens(&["first"]);
    server.apply(&service("a", "10.96.0.1")).unwrap();
    let mut agent = Agent::in_cluster(&server, "first\n").await;
    agent.expect(&["a="]).await;

    fs::write(agent._files.path().join("token"), "second").unwrap();
    server.require_tokens(&["second"]);
    server.compact();
    server.cut_watches();
    server.apply(&service("b", "10.96.0.2")).unwrap();
    agent.expect(&["a=", "b="]).await;
}

#[tokio::test]
async fn a_refused_token_is_told_and_nothing_is_given() {
    let server = ApiServer::start().unwrap();
    server.require_tokens(&["right"]);
    server.apply(&service("a", "10.96.0.1")).unwrap();
    let mut agent = Agent::in_cluster(&server, "wrong").await;
    let status = agent.status(|status| status.troubles.contains_key("Services")).await;
    assert!(status.troubles["Services"].contains("401"), "{status:?}");
    agent.expect_silence(Duration::from_millis(500)).await;
    fs::write(agent._files.path().join("token"), "right").unwrap();
    agent.expect(&["a="]).await;
    agent.status(|status| status.troubles.is_empty()).await;
}

#[tokio::test]
async fn events_are_posted_about_the_service() {
    let server = ApiServer::start().unwrap();
    server.apply(&service("web", "10.96.0.1")).unwrap();
    let agent = Agent::with_kubeconfig(&server).await;
    agent.source.events().post(ServiceEvent {
        service: ServiceName { namespace: "default".to_owned(), name: "web".to_owned() },
        reason: "FailedToStartServiceHealthcheck".to_owned(),
        action: "Listen".to_owned(),
        message: "node here failed".to_owned(),
    });
    until("the event", || !server.posted_events().is_empty()).await;
    let event = &server.posted_events()[0];
    assert_eq!(event["reason"], "FailedToStartServiceHealthcheck");
    assert_eq!(event["type"], "Warning");
    assert_eq!(event["note"], "node here failed");
    assert_eq!(event["regarding"]["name"], "web");
    assert_eq!(event["regarding"]["uid"], "uid-of-web", "kubectl describe finds events by it");
    assert_eq!(event["metadata"]["namespace"], "default");
}

/// An API server is given by its address, but its certificate carries the name that every cluster uses.
#[tokio::test]
async fn tls_is_checked_against_the_name_of_the_api_server() {
    for (name, trusted) in [("kubernetes.default.svc", true), ("example.org", false)] {
        let certificate = Certificate::for_name(name).unwrap();
        let files = tempfile::tempdir().unwrap();
        fs::write(files.path().join("token"), "t").unwrap();
        fs::write(files.path().join("ca.crt"), &certificate.pem).unwrap();
        let server = ApiServer::start_tls(certificate).unwrap();
        server.apply(&service("a", "10.96.0.1")).unwrap();
        let service_account = files.path().to_owned();
        let access = Access::InCluster { api_server: Some(server.url()), service_account };
        let mut agent = Agent::start(access, files).await;
        if trusted {
            agent.expect(&["a="]).await;
        } else {
            let status = agent.status(|status| !status.troubles.is_empty()).await;
            assert!(status.troubles["API server"].contains("certificate"), "{status:?}");
            assert!(!agent.index.is_synced());
        }
    }
}

#[tokio::test]
async fn a_service_account_without_token_is_an_error() {
    let files = tempfile::tempdir().unwrap();
    let access = Access::InCluster {
        api_server: Some("http://127.0.0.1:1".to_owned()),
        service_account: files.path().to_owned(),
    };
    let error = Kubernetes { access, node_name: "here".to_owned() }.start().await.unwrap_err();
    assert!(error.to_string().contains("token"), "{error}");
}
