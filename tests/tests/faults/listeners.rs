//! Listeners under thousands of idle connections: a probe is still answered, from the same host and
//! from another.

use std::fs;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::thread::{scope, sleep};
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::time::timeout;
use traffic_policy_testing::agent::{self, Agent};
use traffic_policy_testing::cluster::Cluster;
use traffic_policy_testing::lab::{Family, Lab};
use traffic_policy_testing::netns::Namespace;
use traffic_policy_testing::object::Policy;
use traffic_policy_testing::pace::scaled;
use traffic_policy_testing::traffic::http;

const CONNECTIONS: usize = 10_000;
const HEALTH: u16 = 32000;

/// Holds connections, half of them with a request that never ends, a byte at a time, until stopped.
/// A connection that is closed is opened again. Counts how often one was opened.
async fn flood(to: SocketAddr, opened: watch::Sender<usize>, stop: watch::Receiver<bool>) {
    let mut tasks = tokio::task::JoinSet::new();
    for number in 0..CONNECTIONS {
        let (opened, mut stop) = (opened.clone(), stop.clone());
        tasks.spawn(async move {
            let again_and_again = async {
                loop {
                    // A connection that is not accepted waits in the kernel's queue, or for a place
                    // in it.
                    let stream = timeout(Duration::from_secs(2), TcpStream::connect(to)).await;
                    if let Ok(Ok(stream)) = stream {
                        opened.send_modify(|opened| *opened += 1);
                        hold(stream, number % 2 == 0).await;
                    }
                    // Some 3,000 a second: more would measure the processor.
                    tokio::time::sleep(Duration::from_secs(3)).await;
                }
            };
            tokio::select! { () = again_and_again => {}, _ = stop.changed() => {} }
        });
        if number % 500 == 499 {
            // The pause keeps the listen queue (somaxconn) from overflowing.
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
    while tasks.join_next().await.is_some() {}
}

/// Keeps a connection until the other end closes it.
async fn hold(mut stream: TcpStream, slow: bool) {
    if slow {
        for byte in b"GET /healthz HTTP/1.1\r\nHost: slow\r\nX: ".iter().cycle() {
            if stream.write_all(&[*byte]).await.is_err() {
                return;
            }
            // The interval is below the 2 s for headers: each byte is a sign of life, which must
            // not extend that limit.
            tokio::time::sleep(Duration::from_millis(700)).await;
        }
    }
    let _ = stream.read(&mut [0; 1]).await;
}

/// The duration of a probe; `None` if it was not answered with `status`.
fn probe(from: &Namespace, to: SocketAddr, path: &str, status: u16) -> Option<Duration> {
    let start = Instant::now();
    let answer = http::get_from(from, to, path).ok()?;
    (answer.status == status).then(|| start.elapsed())
}

#[test]
fn a_probe_among_ten_thousand_connections_and_a_status_for_the_node_itself() {
    let cluster = Cluster::start(Lab::builder().pods(&[1, 1])).unwrap();
    let web = Cluster::node_port("web", Policy::Local, 30080)
        .vip("203.0.113.1".parse().unwrap())
        .health_port(HEALTH);
    cluster.manifests.apply(&web, &cluster.backends()).unwrap();
    let flags = ["--metrics-address", "0.0.0.0:10249"];
    let agent = Agent::builder(&cluster.lab, cluster.lab.node(1)).flags(&flags).start().unwrap();
    agent.wait_ready(Duration::from_secs(20)).unwrap();
    the_status_is_for_the_node_itself(&cluster, &agent);
    a_probe_is_answered(&cluster, &agent);
}

fn a_probe_is_answered(cluster: &Cluster, agent: &Agent) {
    let at = |port| cluster.at(1, Family::V4, port);
    let here = SocketAddr::from(([127, 0, 0, 1], 10256));
    let client = cluster.lab.client().netns();
    let (other, node) = (cluster.lab.node(2).netns(), cluster.lab.node(1).netns());
    for (port, path) in [(10256, "/healthz"), (HEALTH, "/"), (10249, "/healthz")] {
        let (opened, mut seen) = watch::channel(0);
        let (stop, stopped) = watch::channel(false);
        scope(|threads| {
            let flooding = threads.spawn(|| client.block_on(async || flood(at(port), opened, stopped).await));
            let many = client.block_on(async || {
                let many = seen.wait_for(|opened| *opened >= CONNECTIONS);
                timeout(scaled(Duration::from_secs(20)), many).await.is_ok_and(|seen| seen.is_ok())
            });
            let mut took = Vec::new();
            for _ in 0..5 {
                took.push(("same host", probe(client, at(port), path, 200)));
                took.push(("another", probe(other, at(port), path, 200)));
                took.push(("the node", probe(node, SocketAddr::new(here.ip(), port), path, 200)));
                took.push(("/livez", probe(node, here, "/livez", 200)));
                // Five rounds span a second.
                sleep(Duration::from_millis(200));
            }
            stop.send(true).unwrap();
            flooding.join().unwrap();
            assert!(many, "port {port}: only {} connections were opened", *seen.borrow());
            for (from, took_it) in &took {
                let soon = took_it.is_some_and(|took| took < scaled(Duration::from_secs(1)));
                assert!(soon, "port {port}, from {from}: {took:?}\n{}", agent.log());
            }
        });
    }
}

/// Each health-check port needs a file descriptor: the limit of a shell must not limit the number
/// of Services that are served.
#[test]
fn more_health_ports_than_a_shell_allows_files() {
    const FILES: u16 = 128;
    let cluster = Cluster::start(Lab::builder().pods(&[1])).unwrap();
    let ports = HEALTH..HEALTH + 2 * FILES;
    for port in ports.clone() {
        let web = Cluster::node_port(&format!("web-{port}"), Policy::Local, port - 1500)
            .vip("203.0.113.1".parse().unwrap())
            .health_port(port);
        cluster.manifests.apply(&web, &cluster.backends()).unwrap();
    }
    let script = cluster.lab.logs().join("few-files");
    let program = agent::program().unwrap();
    let text = format!("#!/bin/sh\nulimit -S -n {FILES}\nexec {} \"$@\"\n", program.display());
    fs::write(&script, text).unwrap();
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).unwrap();
    let agent = Agent::builder(&cluster.lab, cluster.lab.node(1)).program(&script).start().unwrap();
    // Without a pause: the ports are open when /healthz first says 200, and not a moment later.
    let ready = || agent.healthz().is_ok_and(|answer| answer.status == 200);
    let late = Instant::now() + scaled(Duration::from_secs(20));
    while !ready() {
        assert!(agent.is_running() && Instant::now() < late, "{}", agent.log());
    }
    let client = cluster.lab.client().netns();
    // The last one first, since they are opened in their order.
    for port in ports.rev() {
        let status = http::get_from(client, cluster.at(1, Family::V4, port), "/").map(|answer| answer.status);
        assert_eq!(status.ok(), Some(200), "health port {port}\n{}", agent.log());
    }
}

/// `/status` names API servers and their faults.
fn the_status_is_for_the_node_itself(cluster: &Cluster, agent: &Agent) {
    let to = cluster.at(1, Family::V4, 10256);
    let node = cluster.lab.node(1).netns();
    let statuses =
        [cluster.lab.client().netns(), node].map(|from| http::get_from(from, to, "/status").unwrap().status);
    assert_eq!(statuses, [404, 200], "from elsewhere, and from the node");
    assert_eq!(agent.healthz().unwrap().status, 200);
    assert_eq!(agent.json(&["status"]).unwrap()["agent"]["report"]["in_sync"], true);
}
