//! The Kubernetes source with a real API server and the rights of kube-proxy.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::{io::Write, time::Duration};

use k8s_openapi::{
    api::{
        core::v1::{Node, Service},
        discovery::v1::EndpointSlice,
        events::v1::Event,
    },
    serde::de::DeserializeOwned,
};
use kube::{
    Api,
    api::{DeleteParams, ListParams, Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};
use tokio::time::timeout;
use traffic_policy_cluster::{
    model::{Index, NodeInput, Policy, ServiceName},
    source::{Access, Kubernetes, ObjectEvent, Source, Subject},
};
use traffic_policy_testing::pace::scaled;
use traffic_policy_testing::real_api_server::RealApiServer;

const PATIENCE: Duration = Duration::from_secs(30);

fn object<T: DeserializeOwned>(value: Value) -> T {
    serde_json::from_value(value).unwrap()
}

async fn until(
    source: &mut Source,
    index: &mut Index,
    what: &str,
    mut condition: impl FnMut(&Index) -> bool,
) {
    let input = NodeInput {
        node_name: "here".to_owned(),
        node_port_addresses: vec!["192.0.2.10".parse().unwrap()],
        ipv4: true,
        ..NodeInput::default()
    };
    let waiting = async {
        loop {
            let _ = index.update(&input);
            if index.is_synced() && condition(index) {
                return;
            }
            source.next().await.unwrap().apply(index);
        }
    };
    let arrived = timeout(scaled(PATIENCE), waiting).await;
    assert!(arrived.is_ok(), "waited for {what}: {:?} {:?}", index.desired(), source.status().get());
}

#[tokio::test]
async fn a_real_api_server_is_followed() {
    let Some(server) = RealApiServer::start().await.unwrap() else {
        // Written to stderr directly, past the test harness: a skipped test must be seen.
        writeln!(std::io::stderr(), "SKIPPED a_real_api_server_is_followed: KUBEBUILDER_ASSETS is not set")
            .unwrap();
        return;
    };
    let admin = server.admin().unwrap();
    let services: Api<Service> = Api::namespaced(admin.clone(), "default");
    let slices: Api<EndpointSlice> = Api::namespaced(admin.clone(), "default");
    let nodes: Api<Node> = Api::all(admin.clone());
    let here =
        nodes.create(&PostParams::default(), &object(json!({"metadata": {"name": "here"}}))).await.unwrap();
    assert!(here.metadata.uid.is_some());
    let status = json!({"status": {"addresses": [{"type": "InternalIP", "address": "192.0.2.10"}]}});
    nodes.patch_status("here", &PatchParams::default(), &Patch::Merge(status)).await.unwrap();

    let files = tempfile::tempdir().unwrap();
    server.write_service_account(files.path()).unwrap();
    let access =
        Access::InCluster { api_server: Some(server.url()), service_account: files.path().to_owned() };
    let mut source =
        Kubernetes { relist_within: Duration::from_millis(100), ..Kubernetes::new(access, "here") }
            .start()
            .await
            .unwrap();
    let mut index = Index::default();
    until(&mut source, &mut index, "the first lists", |index| index.desired().node_eligible).await;
    assert_eq!(index.node_addresses("here").len(), 1);

    let web: Service = object(json!({
        "metadata": {"name": "web"},
        "spec": {"type": "NodePort", "externalTrafficPolicy": "Local", "ports": [{"port": 80, "nodePort": 30080}]},
    }));
    services.create(&PostParams::default(), &web).await.unwrap();
    let slice: EndpointSlice = object(json!({
        "metadata": {"name": "web-1", "labels": {"kubernetes.io/service-name": "web"}},
        "addressType": "IPv4",
        "ports": [{"name": "", "port": 8080}],
        "endpoints": [{"addresses": ["10.1.0.1"], "nodeName": "here"}],
    }));
    slices.create(&PostParams::default(), &slice).await.unwrap();
    let port_of_web = |index: &Index| {
        let mut ports = index.desired().ports.iter();
        ports.find(|(key, _)| key.service.name == "web").map(|(_, port)| port.clone())
    };
    until(&mut source, &mut index, "the Service", |index| {
        port_of_web(index).is_some_and(|port| {
            port.external_policy == Policy::Local && port.local.len() == 1 && port.frontends.len() == 2
        })
    })
    .await;

    slices.delete("web-1", &DeleteParams::default()).await.unwrap();
    until(&mut source, &mut index, "the deletion", |index| {
        port_of_web(index).is_some_and(|port| !port.has_endpoints)
    })
    .await;
    assert!(source.status().get().errors.is_empty(), "{:?}", source.status().get());

    let web = ServiceName { namespace: "default".to_owned(), name: "web".to_owned() };
    source.events().post(ObjectEvent::warning(
        Subject::Service(web),
        "FailedToStartServiceHealthcheck",
        "Listen",
        "node here failed".to_owned(),
    ));
    let events: Api<Event> = Api::namespaced(admin, "default");
    let is_ours = |event: &Event| event.reporting_controller.as_deref() == Some("traffic-policy");
    let posted = timeout(scaled(PATIENCE), async {
        loop {
            let list = events.list(&ListParams::default()).await.unwrap();
            // The API server writes Events of its own, about the addresses that it allocates to
            // Services.
            if let Some(event) = list.items.into_iter().find(is_ours) {
                return event;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    });
    let event = posted.await.unwrap_or_else(|_| panic!("no Event of this agent"));
    assert_eq!(event.reason.as_deref(), Some("FailedToStartServiceHealthcheck"));
    assert_eq!(event.regarding.and_then(|service| service.name).as_deref(), Some("web"));
}
