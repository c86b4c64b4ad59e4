//! Connections to the API server: a single HTTP/2 connection for all watches, checked by pings;
//! HTTP/1.1 where the server has no HTTP/2; compressed lists.

use std::{
    fs,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    time::{sleep, timeout},
};
use traffic_policy_cluster::source::{Access, ObjectEvent, Subject};
use traffic_policy_testing::api_server::{ApiServer, Certificate, Kind, Streaming};
use traffic_policy_testing::pace::scaled;

use crate::fixture::{Agent, PATIENCE, node, service, slice, until};

/// Starts a server with this certificate, and an agent that reaches it by the URL that `reach`
/// returns: its own, or that of a relay.
async fn start(
    certificate: Certificate,
    reach: impl AsyncFnOnce(&ApiServer) -> String,
) -> (ApiServer, Agent) {
    let files = tempfile::tempdir().unwrap();
    fs::write(files.path().join("token"), "t").unwrap();
    fs::write(files.path().join("ca.crt"), &certificate.pem).unwrap();
    let server = ApiServer::start_tls(certificate).unwrap();
    server.apply(&service("a", "10.96.0.1")).unwrap();
    let api_server = Some(reach(&server).await);
    let access = Access::InCluster { api_server, service_account: files.path().to_owned() };
    let mut agent = Agent::start(access, files).await;
    agent.expect(&["a="]).await;
    (server, agent)
}

fn certificate() -> Certificate {
    Certificate::for_name("kubernetes.default.svc").unwrap()
}

#[tokio::test]
async fn all_watches_share_one_connection() {
    let (mut server, mut agent) = start(certificate(), async |server| server.url()).await;
    until("the watches", || server.requests_with("watch=true") >= 4).await;
    let traffic = server.traffic();
    assert_eq!(traffic.connections, 1, "{traffic:?}");
    assert!(traffic.requests >= 4 && traffic.multiplexed == traffic.requests, "{traffic:?}");
    // The same holds when all watches are started anew, and after the connection broke.
    server.cut_watches();
    server.apply(&service("b", "10.96.0.2")).unwrap();
    agent.expect(&["a=", "b="]).await;
    assert_eq!(server.traffic().connections, 1);
    server.restart().await.unwrap();
    let watches = server.requests_with("watch=true");
    until("all watches again", || server.requests_with("watch=true") >= watches + 4).await;
    server.apply(&service("c", "10.96.0.3")).unwrap();
    agent.expect(&["a=", "b=", "c="]).await;
    assert_eq!(server.traffic().connections, 2, "{:?}", server.traffic());
}

#[tokio::test]
async fn an_event_leaves_the_watches_as_they_are() {
    let (server, agent) = start(certificate(), async |server| server.url()).await;
    until("the watches", || server.requests_with("watch=true") >= 4).await;
    let event = ObjectEvent::normal(Subject::Node, "NoDriverXdp", "Attach", "eth0 takes no XDP".to_owned());
    agent.source.events().post(event);
    until("the event", || !server.posted_events().is_empty()).await;
    // Nothing may happen: this is twice the two seconds within which an ended watch is started
    // anew.
    sleep(Duration::from_secs(4)).await;
    assert_eq!(server.requests_with("watch=true"), 4);
    assert_eq!(server.traffic().connections, 1, "{:?}", server.traffic());
}

/// One kind changes in a loop. The server writes nothing to the watches of other kinds meanwhile,
/// like a real one: h2 accepts 100 empty DATA frames in the life of a connection, and closes it at
/// the next.
#[tokio::test]
async fn a_loop_of_edits_leaves_the_connection_as_it_is() {
    let (server, mut agent) = start(certificate(), async |server| server.url()).await;
    until("the watches", || server.requests_with("watch=true") >= 4).await;
    for edit in 0..150 {
        let name = format!("edit-{edit}");
        server.apply(&service(&name, "10.96.0.2")).unwrap();
        agent.expect(&["a=", &format!("{name}=")]).await;
        server.delete(Kind::Service, "default", &name);
        agent.expect(&["a="]).await;
    }
    // Each watch goes on: an ended one would deliver this only after it was started anew.
    server.apply(&format!("{}---\n{}", slice("a", &["10.1.0.1"]), node("here", "192.0.2.1"))).unwrap();
    agent.expect(&["a=10.1.0.1:8080"]).await;
    while agent.index.nodes().count() == 0 {
        timeout(scaled(PATIENCE), agent.source.next()).await.unwrap().unwrap().apply(&mut agent.index);
    }
    assert_eq!(server.requests_with("watch=true"), 4);
    assert_eq!(server.traffic().connections, 1, "{:?}", server.traffic());
}

#[tokio::test]
async fn a_server_without_http2_is_asked_by_http1() {
    let (server, mut agent) = start(certificate().without_http2(), async |server| server.url()).await;
    until("the watches", || server.requests_with("watch=true") >= 4).await;
    let traffic = server.traffic();
    assert!(traffic.multiplexed == 0 && traffic.connections >= 4, "{traffic:?}");
    server.apply(&service("b", "10.96.0.2")).unwrap();
    agent.expect(&["a=", "b="]).await;
}

#[tokio::test]
async fn long_lists_come_compressed() {
    let reach = async |server: &ApiServer| {
        server.stream_lists(Streaming::Refused);
        for i in 0..1_000u16 {
            let [high, low] = i.to_be_bytes();
            // The Service belongs to another proxy, so it is not among those that are expected
            // below.
            let other = service(&format!("s{i:04}"), &format!("10.97.{high}.{low}")).replace(
                "metadata: {",
                "metadata: {labels: {service.kubernetes.io/service-proxy-name: other}, ",
            );
            server.apply(&other).unwrap();
        }
        server.url()
    };
    let (server, _agent) = start(certificate(), reach).await;
    let traffic = server.traffic();
    assert_eq!(traffic.compressed, 1, "the list of Services: {traffic:?}");
    assert_eq!(server.lists_of(Kind::Service), 2, "the refused one, and the list");
}

/// A relay that, once stopped, keeps its connections open and passes nothing on: kernels
/// acknowledge, and no answer comes.
struct Relay {
    address: SocketAddr,
    stopped: Arc<AtomicBool>,
}

impl Relay {
    async fn start(to: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let relay = Self { address: listener.local_addr().unwrap(), stopped: Arc::default() };
        let stopped = Arc::clone(&relay.stopped);
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                // A connection that was stopped stays stopped; a later one is relayed.
                let stopped =
                    if stopped.load(Ordering::Acquire) { Arc::default() } else { Arc::clone(&stopped) };
                let server = TcpStream::connect(to).await.unwrap();
                let ((from_client, to_client), (from_server, to_server)) =
                    (client.into_split(), server.into_split());
                tokio::spawn(copy(from_client, to_server, Arc::clone(&stopped)));
                tokio::spawn(copy(from_server, to_client, stopped));
            }
        });
        relay
    }
}

async fn copy(mut from: impl AsyncRead + Unpin, mut to: impl AsyncWrite + Unpin, stopped: Arc<AtomicBool>) {
    let mut buffer = vec![0; 64 * 1024];
    while let Ok(read @ 1..) = from.read(&mut buffer).await {
        if !stopped.load(Ordering::Acquire) && to.write_all(&buffer[..read]).await.is_err() {
            return;
        }
    }
}

/// 30 s of silence, then 15 s for the answer to a ping, like kube-proxy; without pings, watches
/// would stay open and silent for minutes.
#[tokio::test]
async fn a_connection_into_a_black_hole_is_ended_by_pings() {
    let mut relay = None;
    let reach = async |server: &ApiServer| {
        let to = server.url().trim_start_matches("https://").parse().unwrap();
        let address = relay.insert(Relay::start(to).await).address;
        format!("https://{address}")
    };
    let (server, mut agent) = start(certificate(), reach).await;
    until("the watches", || server.requests_with("watch=true") >= 4).await;
    assert_eq!(server.requests_with("/version"), 0);
    // A quiet connection is healthy: this is longer than the interval of a ping and the time for
    // its answer.
    sleep(Duration::from_secs(50)).await;
    assert_eq!((server.traffic().connections, server.requests_with("watch=true")), (1, 4));
    let stopped = Instant::now();
    relay.unwrap().stopped.store(true, Ordering::Release);
    server.apply(&service("b", "10.96.0.2")).unwrap();
    timeout(scaled(Duration::from_secs(90)), agent.wait_for(&["a=", "b="])).await.unwrap();
    let noticed = stopped.elapsed();
    assert!(noticed > Duration::from_secs(10), "it was the pings that noticed: {noticed:?}");
    assert_eq!(server.traffic().connections, 2);
    assert_eq!(server.requests_with("/version"), 0, "no request was needed");
    assert_eq!(server.lists_of(Kind::Service), 1, "the history goes on where it was");
}
