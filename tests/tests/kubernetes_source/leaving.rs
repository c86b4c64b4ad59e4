//! Leases by which nodes announce that they are about to go: written, removed and followed.

use serde_json::{Value, json};
use tokio::{sync::watch, time::timeout};
use traffic_policy_cluster::source::{Announcement, Leaving};
use traffic_policy_testing::api_server::{ApiServer, Kind};
use traffic_policy_testing::pace::scaled;

use crate::fixture::{self, Agent, PATIENCE, node, service, slice, until};

const NAMESPACE: &str = "leaving";
const OWN: &str = "traffic-policy-leaving-here";
const NODE: &str = "Node";

struct Announcing {
    agent: Agent,
    news: watch::Sender<Option<Leaving>>,
    told: watch::Receiver<bool>,
}

impl Announcing {
    async fn start(server: &ApiServer) -> Self {
        let (news, receiver) = watch::channel(None);
        let (sender, told) = watch::channel(false);
        let announcement = Announcement { namespace: NAMESPACE.to_owned(), news: receiver, told: sender };
        Self { agent: Agent::announcing(server, announcement).await, news, told }
    }

    fn say(&self, reason: &str) {
        let gone_by = "2026-11-24T13:00:30Z".parse().ok();
        self.news.send_replace(Some(Leaving { reason: reason.to_owned(), gone_by }));
    }

    async fn told(&mut self, wanted: bool) {
        timeout(scaled(PATIENCE), self.told.wait_for(|told| *told == wanted)).await.unwrap().unwrap();
    }

    /// Waits until these nodes count as leaving. Cluster changes until then are applied.
    async fn expect(&mut self, wanted: &[&str]) {
        let Agent { source, index, .. } = &mut self.agent;
        let arriving = async {
            loop {
                let _ = index.update(&here());
                if index.is_synced() && index.leaving_nodes().iter().eq(wanted) {
                    return;
                }
                source.next().await.expect("the source goes on").apply(index);
            }
        };
        let arrived = timeout(scaled(PATIENCE), arriving).await;
        assert!(arrived.is_ok(), "{wanted:?}: {:?}", self.agent.index.leaving_nodes());
    }
}

fn here() -> traffic_policy_cluster::model::NodeInput {
    traffic_policy_cluster::model::NodeInput {
        node_name: "here".to_owned(),
        ipv4: true,
        ..Default::default()
    }
}

fn lease(name: &str, holder: &str, boot_id: &str) -> Value {
    let (label, annotation) = ("traffic-policy.io/leaving", "traffic-policy.io/leaving-boot-id");
    fixture::lease((NAMESPACE, name), holder, (label, "true"), (annotation, boot_id))
}

fn own(server: &ApiServer) -> Option<Value> {
    server.object(Kind::Lease, NAMESPACE, OWN)
}

#[tokio::test]
async fn an_announcement_comes_and_goes_with_the_news() {
    let server = ApiServer::start().unwrap();
    server.apply(&node("here", "192.0.2.1")).unwrap();
    let mut node = Announcing::start(&server).await;
    until("the look at earlier Leases", || server.requests_with(&format!("metadata.name%3D{OWN}")) > 0).await;
    assert_eq!(own(&server), None);
    node.say("drained");
    node.told(true).await;
    let lease = own(&server).unwrap();
    let metadata = &lease["metadata"];
    assert_eq!(metadata["labels"]["traffic-policy.io/leaving"], "true");
    let annotations = &metadata["annotations"];
    assert_eq!(annotations["traffic-policy.io/leaving-reason"], "drained");
    assert_eq!(annotations["traffic-policy.io/leaving-gone-by"], "2026-11-24T13:00:30Z");
    let boot_id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    assert_eq!(annotations["traffic-policy.io/leaving-boot-id"], boot_id.trim());
    assert_eq!(lease["spec"]["holderIdentity"], "here");
    let owner = &metadata["ownerReferences"][0];
    let kind = (owner["kind"].as_str(), owner["uid"].as_str());
    assert_eq!(kind, (Some(NODE), Some("uid-of-here")), "it goes with the Node");
    node.say("powered off");
    until("the other reason", || {
        own(&server).is_some_and(|lease| {
            lease["metadata"]["annotations"]["traffic-policy.io/leaving-reason"] == "powered off"
        })
    })
    .await;
    node.news.send_replace(None);
    node.told(false).await;
    assert_eq!(own(&server), None);
    let writes = || {
        let requests = server.requests();
        requests.iter().filter(|(_, request)| request.contains("PATCH") || request.contains("DELETE")).count()
    };
    assert_eq!(writes(), 3, "{:?}", server.requests());
}

#[tokio::test]
async fn what_an_earlier_boot_announced_is_removed_and_nothing_else() {
    let server = ApiServer::start().unwrap();
    server.apply(&node("here", "192.0.2.1")).unwrap();
    server.put(lease(OWN, "here", "an-earlier-boot")).unwrap();
    server.put(lease("traffic-policy-leaving-other", "other", "an-earlier-boot")).unwrap();
    let mut node = Announcing::start(&server).await;
    node.expect(&["other"]).await;
    until("the own Lease to go", || own(&server).is_none()).await;
    assert!(server.object(Kind::Lease, NAMESPACE, "traffic-policy-leaving-other").is_some());

    // An agent that was restarted meanwhile has not asked its sources yet.
    let boot_id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    server.put(lease(OWN, "here", boot_id.trim())).unwrap();
    let asked = || server.requests_with(&format!("metadata.name%3D{OWN}"));
    let before = asked();
    let mut again = Announcing::start(&server).await;
    until("the look at the Lease", || asked() > before).await;
    again.expect(&["other"]).await;
    assert!(own(&server).is_some(), "of this same boot");
    again.say("still true");
    again.told(true).await;
    again.news.send_replace(None);
    until("the Lease to go", || own(&server).is_none()).await;
}

#[tokio::test]
async fn others_are_followed_and_their_endpoints_are_still_there() {
    let server = ApiServer::start().unwrap();
    server.apply(&node("here", "192.0.2.1")).unwrap();
    server.apply(&service("web", "10.96.0.1")).unwrap();
    server.apply(&slice("web", &["10.244.0.1"])).unwrap();
    let mut node = Announcing::start(&server).await;
    node.expect(&[]).await;
    node.agent.expect(&["web=10.244.0.1:8080"]).await;
    server.put(lease("a", "node-a", "x")).unwrap();
    server.put(lease("b", "here", "x")).unwrap();
    node.expect(&["node-a"]).await;
    // Leases of leader elections are none of its business.
    let mut foreign = lease("kube-scheduler", "node-b", "x");
    foreign["metadata"]["labels"] = json!({});
    server.put(foreign).unwrap();
    server.put(lease("c", "node-c", "x")).unwrap();
    node.expect(&["node-a", "node-c"]).await;
    server.delete(Kind::Lease, NAMESPACE, "a");
    node.expect(&["node-c"]).await;
    // What changes while the watch is away is seen after it.
    server.delete(Kind::Lease, NAMESPACE, "c");
    server.compact();
    server.cut_watches();
    node.expect(&[]).await;
}

#[tokio::test]
async fn a_role_without_leases_loses_this_and_nothing_else() {
    let server = ApiServer::start().unwrap();
    server.apply(&node("here", "192.0.2.1")).unwrap();
    server.apply(&service("web", "10.96.0.1")).unwrap();
    server.refuse(Kind::Lease, 403);
    let mut node = Announcing::start(&server).await;
    node.say("drained");
    node.agent.expect(&["web="]).await;
    assert!(!*node.told.borrow(), "nobody knows");
}
