//! From a folder of manifests to the answers of the health-check port: the agent's loop with the data plane left out.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::{fs, net::SocketAddr, path::Path, time::Duration};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    time::{Instant, sleep_until, timeout},
};
use traffic_policy_agent::{
    health::{ListenFailure, ProxyHealth, ServiceHealth},
    model::{Index, NodeInput},
    source::{Manifests, ServiceEvent, Source},
};
use traffic_policy_testing::pace::scaled;

const BATCH: Duration = Duration::from_millis(50);

/// Never returns, except when the source breaks.
async fn control_loop(mut source: Source, proxy: ProxyHealth, node_name: &str) {
    let mut index = Index::default();
    let mut health = ServiceHealth::new(node_name.to_owned(), proxy.clone());
    let mut next_write = Instant::now();
    while let Some(batch) = source.next().await {
        let mut changed = batch.apply(&mut index);
        if index.is_synced() && changed {
            proxy.queued();
        }
        // The first change is written at once; what follows closely is gathered.
        sleep_until(next_write).await;
        while let Some(batch) = source.try_next() {
            changed |= batch.apply(&mut index);
        }
        if !index.is_synced() || !changed {
            continue;
        }
        let input = NodeInput {
            node_name: node_name.to_owned(),
            node_port_addresses: index.node_addresses(node_name).to_vec(),
            ipv4: true,
            ipv6: true,
            ..NodeInput::default()
        };
        let _changes = index.update(&input);
        // Here the data plane writes what changed; only then may anybody hear of it.
        proxy.set_node_eligible(index.desired().node_eligible);
        proxy.synced();
        for failure in health.update(&index.desired().health).await {
            source.events().post(ServiceEvent {
                message: failure.message(node_name),
                service: failure.service,
                reason: ListenFailure::REASON.to_owned(),
                action: ListenFailure::ACTION.to_owned(),
            });
        }
        next_write = Instant::now() + BATCH;
    }
}

fn write(folder: &Path, policy: &str, port: u16, node: &str) {
    let health = if policy == "Local" { format!("healthCheckNodePort: {port}") } else { String::new() };
    let text = format!(
        "apiVersion: v1\nkind: Service\nmetadata: {{name: web}}\n\
         spec:\n  type: LoadBalancer\n  clusterIP: 10.96.0.1\n  externalTrafficPolicy: {policy}\n  {health}\n  \
         ports: [{{port: 80}}]\n---\n\
         apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\naddressType: IPv4\n\
         metadata: {{name: web-1, labels: {{kubernetes.io/service-name: web}}}}\n\
         ports: [{{port: 8080}}]\nendpoints: [{{addresses: [10.1.0.1], nodeName: {node}}}]\n"
    );
    fs::write(folder.join(".new"), text).unwrap();
    fs::rename(folder.join(".new"), folder.join("web.yaml")).unwrap();
}

async fn status(port: u16) -> Option<u16> {
    let mut stream = TcpStream::connect(SocketAddr::from(([127, 0, 0, 1], port))).await.ok()?;
    stream.write_all(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").await.ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.ok()?;
    answer.get(9..12)?.parse().ok()
}

#[tokio::test]
async fn the_health_check_port_follows_the_manifests() {
    let folder = tempfile::tempdir().unwrap();
    let port = TcpListener::bind("0.0.0.0:0").await.unwrap().local_addr().unwrap().port();
    write(folder.path(), "Local", port, "here");
    let source = Manifests { folder: folder.path().to_owned(), node_name: "here".to_owned() }.start();
    let agent = tokio::spawn(async { control_loop(source, ProxyHealth::new(true, true), "here").await });

    for (policy, node, wanted) in [
        ("Local", "here", Some(200)),
        ("Local", "there", Some(503)),
        ("Local", "here", Some(200)),
        ("Cluster", "here", None),
        ("Local", "here", Some(200)),
    ] {
        write(folder.path(), policy, port, node);
        let arrived = timeout(scaled(Duration::from_secs(10)), async {
            while status(port).await != wanted {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        });
        assert!(
            arrived.await.is_ok(),
            "{policy}, endpoint {node}: not {wanted:?} but {:?}",
            status(port).await
        );
    }
    agent.abort();
}
