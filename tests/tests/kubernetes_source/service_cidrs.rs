//! Ranges of cluster IPs, which an older API server does not know.

use std::time::Duration;

use tokio::time::timeout;
use traffic_policy_testing::api_server::{ApiServer, Kind};
use traffic_policy_testing::pace::scaled;

use crate::fixture::{Agent, PATIENCE, service, slice};

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
        assert!(timeout(scaled(PATIENCE), waiting).await.is_ok(), "{wanted:?}: {:?}", agent.index.desired());
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
        assert!(status.errors.is_empty(), "{status:?}");
        // Each node requests it, so frequent requests would be a load.
        tokio::time::sleep(Duration::from_secs(3)).await;
        assert_eq!(server.lists_of(Kind::ServiceCidr), 1);
    }
    // The source waits for resources that every API server has and every proxy may read.
    let server = ApiServer::start().unwrap();
    server.refuse(Kind::Service, 403);
    let mut agent = Agent::with_kubeconfig(&server).await;
    let status = agent.status(|status| status.errors.contains_key("Services")).await;
    assert!(status.errors["Services"].contains("403"), "{status:?}");
    while let Some(batch) = agent.source.try_next() {
        batch.apply(&mut agent.index);
    }
    assert!(!agent.index.is_synced());
}
