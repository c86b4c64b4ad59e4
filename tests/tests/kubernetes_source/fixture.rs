//! An agent's view of an API server, and the objects of the server.

use std::{fs, time::Duration};

use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::time::timeout;
use traffic_policy_cluster::{
    model::{Index, NodeInput},
    source::{Access, Announcement, Kubernetes, Opening, Source, Status},
};
use traffic_policy_testing::api_server::ApiServer;
use traffic_policy_testing::pace::scaled;

/// The time limit, longer than the longest pause of the source between two attempts for which a
/// test waits.
pub const PATIENCE: Duration = Duration::from_secs(30);

pub fn service(name: &str, ip: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Service\nmetadata: {{name: {name}}}\n\
         spec: {{clusterIP: {ip}, ports: [{{port: 80}}]}}\n"
    )
}

pub fn slice(service: &str, addresses: &[&str]) -> String {
    let endpoints: Vec<_> =
        addresses.iter().map(|ip| format!("{{addresses: ['{ip}'], nodeName: here}}")).collect();
    format!(
        "apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\n\
         metadata: {{name: {service}-1, labels: {{kubernetes.io/service-name: {service}}}}}\n\
         addressType: IPv4\nports: [{{port: 8080}}]\nendpoints: [{}]\n",
        endpoints.join(", ")
    )
}

pub fn node(name: &str, ip: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Node\nmetadata: {{name: {name}}}\n\
         status: {{addresses: [{{type: InternalIP, address: {ip}}}]}}\n"
    )
}

/// A Lease with one label and one annotation, each a key and its value.
pub fn lease(
    (namespace, name): (&str, &str),
    holder: &str,
    (label, labelled): (&str, &str),
    (annotation, annotated): (&str, &str),
) -> Value {
    json!({
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "labels": {label: labelled},
            "annotations": {annotation: annotated},
        },
        "spec": {"holderIdentity": holder},
    })
}

fn kubeconfig(server: &ApiServer) -> (Access, TempDir) {
    let files = tempfile::tempdir().unwrap();
    let path = files.path().join("kubeconfig");
    server.write_kubeconfig(&path).unwrap();
    (Access::Kubeconfig(path), files)
}

/// An agent's view of the API: its current state.
pub struct Agent {
    pub source: Source,
    pub index: Index,
    files: TempDir,
}

impl Agent {
    pub async fn with_kubeconfig(server: &ApiServer) -> Self {
        let (access, files) = kubeconfig(server);
        Self::start(access, files).await
    }

    pub async fn in_cluster(server: &ApiServer, token: &str) -> Self {
        let files = tempfile::tempdir().unwrap();
        fs::write(files.path().join("token"), token).unwrap();
        let service_account = files.path().to_owned();
        Self::start(Access::InCluster { api_server: Some(server.url()), service_account }, files).await
    }

    /// Writes another token of the service account.
    pub fn rotate(&self, token: &str) {
        fs::write(self.files.path().join("token"), token).unwrap();
    }

    pub async fn start(access: Access, files: TempDir) -> Self {
        Self::start_as(Kubernetes::new(access, "here"), files).await
    }

    /// A variant of [`Self::with_kubeconfig`] that announces that its node is about to go.
    pub async fn announcing(server: &ApiServer, announcement: Announcement) -> Self {
        let (access, files) = kubeconfig(server);
        let source = Kubernetes { announcement: Some(announcement), ..Kubernetes::new(access, "here") };
        Self::start_as(source, files).await
    }

    /// A variant of [`Self::with_kubeconfig`] that takes part in direct forwarding.
    pub async fn opening(server: &ApiServer, opening: Opening) -> Self {
        let (access, files) = kubeconfig(server);
        let source = Kubernetes { opening: Some(opening), ..Kubernetes::new(access, "here") };
        Self::start_as(source, files).await
    }

    async fn start_as(source: Kubernetes, files: TempDir) -> Self {
        let source = Kubernetes { relist_within: Duration::from_millis(100), ..source };
        Self { source: source.start().await.unwrap(), index: Index::default(), files }
    }

    /// Each Service with its endpoints, as `name=endpoint,endpoint`.
    pub fn services(&mut self) -> Vec<String> {
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

    /// Waits until the agent has this state. Returns the states on the way.
    pub async fn expect(&mut self, wanted: &[&str]) -> Vec<Vec<String>> {
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
        let arrived = timeout(scaled(PATIENCE), waiting).await;
        assert!(
            arrived.is_ok(),
            "expected {wanted:?}, seen {seen:?}, status {:?}",
            self.source.status().get()
        );
        seen
    }

    /// A variant of [`Self::expect`] without a time limit.
    pub async fn wait_for(&mut self, wanted: &[&str]) {
        while self.services() != wanted {
            self.source.next().await.expect("the source goes on").apply(&mut self.index);
        }
    }

    /// Checks that no other state follows within this time.
    pub async fn expect_silence(&mut self, time: Duration) {
        if let Ok(batch) = timeout(time, self.source.next()).await {
            panic!("unexpected: {batch:?}");
        }
    }

    pub async fn status(&self, condition: impl FnMut(&Status) -> bool) -> Status {
        let mut status = self.source.status();
        let now = status.get();
        timeout(scaled(PATIENCE), status.wait_for(condition))
            .await
            .unwrap_or_else(|_| panic!("status {now:?}"))
            .unwrap()
    }
}

pub async fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let waiting = async {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(scaled(PATIENCE), waiting).await.unwrap_or_else(|_| panic!("waited for {what} in vain"));
}
