//! Leases by which nodes take part in direct forwarding: written, renewed, followed, and changed by
//! neighbours.

use std::time::Duration;

use serde_json::{Value, json};
use tokio::time::timeout;
use traffic_policy_cluster::model::Forwarding;
use traffic_policy_cluster::source::{Access, DirectNews, DirectPart, DirectTold, Opening, try_opening};
use traffic_policy_testing::api_server::{ApiServer, Kind};
use traffic_policy_testing::pace::scaled;

use crate::fixture::{self, Agent, PATIENCE, node, until};

const NAMESPACE: &str = "opening";
const OWN: &str = "traffic-policy-opens-here";
const RENEWED: &str = "traffic-policy-renewed-here";
const THERE: &str = "traffic-policy-opens-there";
/// Four of these without a renewal are two seconds, as the Lease says.
const PERIOD: Duration = Duration::from_millis(500);

async fn start(server: &ApiServer) -> (Agent, Opening) {
    let opening = Opening { period: PERIOD, ..Opening::new(NAMESPACE.to_owned()) };
    (Agent::opening(server, opening.clone()).await, opening)
}

fn part(why_not: Option<&str>) -> DirectPart {
    DirectPart {
        addresses: ["192.0.2.1".parse().unwrap()].into(),
        why_not: why_not.map(str::to_owned),
        ..DirectPart::default()
    }
}

fn lease(name: &str, holder: &str, opens: &str) -> Value {
    let (label, annotation) = ("traffic-policy.io/opens", "traffic-policy.io/opens-from");
    fixture::lease((NAMESPACE, name), holder, (label, opens), (annotation, "192.0.2.2"))
}

fn found(server: &ApiServer, name: &str) -> Option<Value> {
    server.object(Kind::Lease, NAMESPACE, name)
}

fn opens(server: &ApiServer, name: &str) -> Option<String> {
    found(server, name)?["metadata"]["labels"]["traffic-policy.io/opens"].as_str().map(str::to_owned)
}

fn writes(server: &ApiServer, name: &str) -> usize {
    let requests = server.requests();
    requests.iter().filter(|(_, request)| request.contains("PATCH") && request.contains(name)).count()
}

#[tokio::test]
async fn only_a_change_is_written_while_the_other_lease_is_renewed() {
    let server = ApiServer::start().unwrap();
    server.apply(&node("here", "192.0.2.1")).unwrap();
    let (_agent, opening) = start(&server).await;
    let mut told = opening.told.subscribe();
    opening.news.send_modify(|news| news.own = Some(part(None)));
    timeout(scaled(PATIENCE), told.wait_for(|told| told.held == Some(part(None)))).await.unwrap().unwrap();
    assert_eq!(opens(&server, OWN).as_deref(), Some("ipip"));
    let annotations = found(&server, OWN).unwrap()["metadata"]["annotations"].clone();
    assert_eq!(annotations["traffic-policy.io/opens-dispatch"], "ipip,udp,l2");
    assert_eq!(annotations["traffic-policy.io/opens-protocols"], "tcp,udp,sctp");
    let renewals = writes(&server, RENEWED);
    assert!(renewals > 0, "renewed before it is said that packets are opened");
    until("five renewals", || writes(&server, RENEWED) >= renewals + 5).await;
    assert_eq!(writes(&server, OWN), 1, "{:?}", server.requests());
    let renewed = found(&server, RENEWED).unwrap();
    assert_eq!(renewed["spec"]["leaseDurationSeconds"], 2);

    let replies =
        || found(&server, OWN).unwrap()["metadata"]["annotations"]["traffic-policy.io/opens-reply"].clone();
    assert_eq!(replies(), "tunnel");
    let with_sctp = DirectPart { tunnels_sctp: true, ..part(None) };
    opening.news.send_modify(|news| news.own = Some(with_sctp));
    until("replies of SCTP", || replies() == "tunnel,tunnel-sctp").await;
    assert_eq!(writes(&server, OWN), 2);

    opening.news.send_modify(|news| news.own = Some(part(Some("it is about to go"))));
    until("the change", || opens(&server, OWN).as_deref() == Some("none")).await;
    let why = found(&server, OWN).unwrap()["metadata"]["annotations"]["traffic-policy.io/opens-not"].clone();
    assert_eq!(why, "it is about to go");
    assert_eq!(writes(&server, OWN), 3);
}

/// Kubernetes removes Leases whose Node object is gone, also when there is another one of its name.
#[tokio::test]
async fn the_leases_belong_to_the_node_as_it_is_now() {
    let server = ApiServer::start().unwrap();
    let register = |uid: &str| {
        let node = json!({
            "apiVersion": "v1", "kind": "Node", "metadata": {"name": "here", "uid": uid},
            "status": {"addresses": [{"type": "InternalIP", "address": "192.0.2.1"}]},
        });
        server.put(node).unwrap();
    };
    let owners = |name: &str| {
        let found = found(&server, name)?["metadata"]["ownerReferences"].clone();
        Some(found.as_array()?.iter().map(|owner| owner["uid"].as_str().unwrap().to_owned()).collect())
    };
    let belong_to = |uid: &str| {
        let wanted = Some(vec![uid.to_owned()]);
        owners(OWN) == wanted && owners(RENEWED) == wanted
    };
    register("first");
    // An earlier agent has written the same, before the Node object was made anew.
    let mut earlier = lease(OWN, "here", "ipip");
    earlier["metadata"]["annotations"] = json!({
        "traffic-policy.io/opens-from": "192.0.2.1",
        "traffic-policy.io/opens-dispatch": "ipip,udp,l2",
        "traffic-policy.io/opens-protocols": "tcp,udp,sctp",
        "traffic-policy.io/opens-reply": "tunnel",
        "traffic-policy.io/opens-l2-by": "",
    });
    earlier["metadata"]["ownerReferences"] =
        json!([{"apiVersion": "v1", "kind": "Node", "name": "here", "uid": "zeroth"}]);
    server.put(earlier).unwrap();
    let (mut agent, opening) = start(&server).await;
    while !agent.index.is_synced() {
        agent.source.next().await.expect("the source goes on").apply(&mut agent.index);
    }
    let seen = agent.index.direct_leases().find(|lease| lease.node == "here").cloned();
    assert!(seen.as_ref().is_some_and(|seen| part(None).is_told_by(seen)), "{seen:?}");
    opening.news.send_modify(|news| {
        news.own = Some(part(None));
        news.seen = seen;
    });
    until("the owner of an earlier agent's Lease", || belong_to("first")).await;
    assert_eq!(writes(&server, OWN), 1, "{:?}", server.requests());

    // The Node object is made anew while the agent runs.
    let lists = server.lists_of(Kind::Node);
    register("second");
    until("the Node that is there now", || belong_to("second")).await;
    assert_eq!(writes(&server, OWN), 2, "{:?}", server.requests());

    // It is gone, and Kubernetes removes what belongs to it: once.
    server.delete(Kind::Node, "", "here");
    let troubled = |told: &DirectTold| told.trouble.as_ref().is_some_and(|why| why.contains("Node object"));
    let mut told = opening.told.subscribe();
    timeout(scaled(PATIENCE), told.wait_for(troubled)).await.unwrap().unwrap();
    for name in [OWN, RENEWED] {
        server.delete(Kind::Lease, NAMESPACE, name);
    }
    opening.news.send_modify(|news| news.seen = None);
    // Several renewals would have been due: that nothing is written takes time to see.
    tokio::time::sleep(PERIOD * 3).await;
    assert!(
        found(&server, OWN).is_none() && found(&server, RENEWED).is_none(),
        "they would be removed again"
    );
    register("third");
    until("the Node that is back", || belong_to("third")).await;
    timeout(scaled(PATIENCE), told.wait_for(|told| told.held == Some(part(None)))).await.unwrap().unwrap();
    assert_eq!(writes(&server, OWN), 3, "{:?}", server.requests());
    assert_eq!(server.lists_of(Kind::Node), lists, "the Node is followed");
}

/// `check --direct` finds out whether the role suffices, without a Lease.
#[tokio::test]
async fn a_check_tries_without_writing() {
    let server = ApiServer::start().unwrap();
    let files = tempfile::tempdir().unwrap();
    let path = files.path().join("kubeconfig");
    server.write_kubeconfig(&path).unwrap();
    try_opening(&Access::Kubeconfig(path), NAMESPACE).await.unwrap();
    let requests = server.requests();
    let writes: Vec<_> =
        requests.iter().map(|(_, request)| request).filter(|request| request.contains("PATCH")).collect();
    assert!(writes.len() == 1 && writes[0].contains("dryRun=All"), "{requests:?}");
}

/// An agent that was removed without a word renews nothing, and may not follow changes any more.
#[tokio::test]
async fn a_neighbour_that_renews_nothing_opens_nothing() {
    let server = ApiServer::start().unwrap();
    server.apply(&node("here", "192.0.2.1")).unwrap();
    server.put(lease(THERE, "there", "ipip")).unwrap();
    let (_agent, opening) = start(&server).await;
    let neighbours = vec!["there".to_owned()];
    opening.news.send_replace(DirectNews {
        own: Some(part(None)),
        neighbours,
        nodes: 2,
        ..DirectNews::default()
    });
    let number = |count: usize| {
        let mut renewed = lease("traffic-policy-renewed-there", "there", "");
        renewed["metadata"]["labels"] = json!({});
        renewed["spec"]["leaseDurationSeconds"] = 2.into();
        renewed["spec"]["renewTime"] = format!("2026-11-24T13:00:{count:02}.000000Z").into();
        server.put(renewed).unwrap();
    };
    let looks = || server.requests_with("traffic-policy-renewed-there");
    for count in 0..12 {
        number(count);
        let before = looks();
        until("a look", || looks() > before).await;
    }
    assert_eq!(opens(&server, THERE).as_deref(), Some("ipip"), "it was renewed each time");
    until("the Lease of the silent one", || opens(&server, THERE).as_deref() == Some("none")).await;
    let changed = found(&server, THERE).unwrap();
    assert_eq!(
        changed["metadata"]["annotations"]["traffic-policy.io/opens-from"], "192.0.2.2",
        "it may still send"
    );
    assert!(
        changed["metadata"]["annotations"]["traffic-policy.io/opens-not"]
            .as_str()
            .unwrap()
            .contains("renewed")
    );
}

#[tokio::test]
async fn others_are_followed() {
    let server = ApiServer::start().unwrap();
    server.apply(&node("here", "192.0.2.1")).unwrap();
    server.put(lease(THERE, "there", "ipip")).unwrap();
    server.put(lease("traffic-policy-opens-late", "late", "udp")).unwrap();
    let (mut agent, _opening) = start(&server).await;
    let sees = async |agent: &mut Agent, wanted: &[&str]| {
        let arriving = async {
            loop {
                let _ = agent.services();
                if agent.index.is_synced() && agent.index.direct_nodes(Forwarding::Snat).keys().eq(wanted) {
                    return;
                }
                agent.source.next().await.expect("the source goes on").apply(&mut agent.index);
            }
        };
        assert!(timeout(scaled(PATIENCE), arriving).await.is_ok(), "{wanted:?}");
    };
    sees(&mut agent, &["there"]).await;
    server.put(lease(THERE, "there", "none")).unwrap();
    sees(&mut agent, &[]).await;
    assert_eq!(agent.index.desired().direct_nodes.len(), 1, "its packets are still opened");
    server.put(lease(THERE, "there", "ipip")).unwrap();
    sees(&mut agent, &["there"]).await;
    server.delete(Kind::Lease, NAMESPACE, THERE);
    sees(&mut agent, &[]).await;
    assert!(agent.index.desired().direct_nodes.is_empty());
}
