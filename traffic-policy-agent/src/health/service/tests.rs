//! Health-check ports over real sockets of this host.

use tokio::net::TcpListener;

use super::{
    super::listener::tests::{get, localhost, until_open},
    *,
};

fn name(name: &str) -> ServiceName {
    ServiceName { namespace: "ns".to_owned(), name: name.to_owned() }
}

fn checks(checks: &[(&str, u16, usize)]) -> BTreeMap<ServiceName, HealthCheck> {
    checks
        .iter()
        .map(|&(service, port, local_endpoints)| {
            (name(service), HealthCheck { port, local_endpoints, load_balancer_ips: BTreeSet::new() })
        })
        .collect()
}

impl ServiceHealth {
    async fn update_all(&mut self, checks: &BTreeMap<ServiceName, HealthCheck>) -> Vec<ListenFailure> {
        self.update(checks, &[IpAddr::from([0, 0, 0, 0])].into()).await
    }
}

fn server() -> (ServiceHealth, ProxyHealth) {
    let proxy = ProxyHealth::new(true, true);
    (ServiceHealth::new("here".to_owned(), proxy.clone()), proxy)
}

/// Returns ports that were free a moment ago.
async fn free_ports<const N: usize>() -> [u16; N] {
    let mut listeners = Vec::new();
    for _ in 0..N {
        listeners.push(TcpListener::bind("0.0.0.0:0").await.unwrap());
    }
    std::array::from_fn(|i| listeners[i].local_addr().unwrap().port())
}

async fn refused(port: u16) -> bool {
    tokio::net::TcpStream::connect(localhost(port)).await.is_err()
}

#[tokio::test]
async fn answers_as_kube_proxy_does() {
    let (mut health, proxy) = server();
    let [port] = free_ports().await;
    for (count, healthy, status) in [
        (1, false, "503 Service Unavailable"),
        (0, true, "503 Service Unavailable"),
        (1, true, "200 OK"),
        (18, true, "200 OK"),
    ] {
        if healthy {
            proxy.synced();
        }
        assert!(health.update_all(&checks(&[("svc", port, count)])).await.is_empty());
        let answer = get(localhost(port), "/any/path").await;
        assert!(answer.starts_with(&format!("HTTP/1.1 {status}\r\n")), "{answer}");
        for header in ["Content-Type: application/json", "X-Content-Type-Options: nosniff"] {
            assert!(answer.contains(&format!("{header}\r\n")), "{answer}");
        }
        assert!(answer.contains(&format!("X-Load-Balancing-Endpoint-Weight: {count}\r\n")), "{answer}");
        let body = format!(
            "\r\n\r\n{{\n\t\"service\": {{\n\t\t\"namespace\": \"ns\",\n\t\t\"name\": \"svc\"\n\t}},\n\
             \t\"localEndpoints\": {count},\n\t\"serviceProxyHealthy\": {healthy}\n}}"
        );
        assert!(answer.ends_with(&body), "{answer}");
    }
}

#[tokio::test]
async fn ports_follow_the_services() {
    let (mut health, proxy) = server();
    proxy.synced();
    let [a, b] = free_ports().await;
    assert!(health.update_all(&checks(&[("one", a, 1), ("two", b, 2)])).await.is_empty());
    // The Services swap their ports, in one update.
    assert!(health.update_all(&checks(&[("one", b, 1), ("two", a, 2)])).await.is_empty());
    assert!(get(localhost(a), "/").await.contains("\"name\": \"two\""));
    assert!(get(localhost(b), "/").await.contains("\"name\": \"one\""));
    assert!(health.update_all(&checks(&[("one", b, 1)])).await.is_empty());
    assert!(refused(a).await);
    assert!(health.update_all(&BTreeMap::new()).await.is_empty());
    assert!(refused(b).await);
}

#[tokio::test]
async fn a_taken_port_is_told_once_and_tried_again() {
    let (mut health, _) = server();
    let taken = TcpListener::bind("0.0.0.0:0").await.unwrap();
    let port = taken.local_addr().unwrap().port();
    let [free] = free_ports().await;
    let wanted = checks(&[("svc", port, 1), ("other", free, 1)]);
    let failures = health.update_all(&wanted).await;
    assert_eq!(failures.len(), 1);
    assert_eq!((&failures[0].service, failures[0].port), (&name("svc"), port));
    let message = failures[0].message("here");
    assert!(message.starts_with("node here failed to start healthcheck \"ns/svc\" on port "), "{message}");
    assert!(!refused(free).await, "other Services are not touched");

    assert!(health.update_all(&wanted).await.is_empty());
    assert!(health.has_failures());
    drop(taken);
    assert!(health.update_all(&wanted).await.is_empty());
    assert!(!health.has_failures());
    assert!(!refused(port).await);
}

#[tokio::test]
async fn ports_follow_the_addresses() {
    let (mut health, _) = server();
    let [port] = free_ports().await;
    let wanted = checks(&[("svc", port, 1)]);
    let [one, two] = [1, 2].map(|last| IpAddr::from([127, 0, 0, last]));
    let open = async |address| tokio::net::TcpStream::connect(SocketAddr::new(address, port)).await.is_ok();
    assert!(health.update(&wanted, &[one].into()).await.is_empty());
    assert_eq!((open(one).await, open(two).await), (true, false));
    assert!(health.update(&wanted, &[two].into()).await.is_empty());
    assert_eq!((open(one).await, open(two).await), (false, true));
    assert!(health.update(&BTreeMap::new(), &[two].into()).await.is_empty());
    assert_eq!((open(one).await, open(two).await), (false, false));
}

/// An added or removed endpoint belongs to one Service, however many others exist.
#[tokio::test]
async fn a_change_looks_at_its_own_check() {
    let (mut health, _) = server();
    let [port, other] = free_ports().await;
    let many: Vec<_> = (0..1_000).map(|number| format!("s{number}")).collect();
    // The checks have no address, because the ports are not what is counted.
    let mut wanted = checks(&many.iter().map(|name| (&name[..], port, 1)).collect::<Vec<_>>());
    assert!(health.update(&wanted, &BTreeSet::new()).await.is_empty());
    assert_eq!(health.looked_at, 1_000);
    wanted.get_mut(&name("s7")).unwrap().local_endpoints = 5;
    let one = [name("s7")].into();
    assert!(health.update_those(&wanted, &BTreeSet::new(), &one).await.is_empty());
    assert_eq!((health.looked_at, health.counts.lock()[&name("s7")]), (1_001, 5));
    wanted.remove(&name("s7"));
    health.update_those(&wanted, &BTreeSet::new(), &one).await;
    assert_eq!((health.looked_at, health.counts.lock().len()), (1_002, 999));
    // Ports of others that failed are tried again.
    let taken = TcpListener::bind(localhost(other)).await.unwrap();
    let failing = [IpAddr::from([127, 0, 0, 1])].into();
    wanted.insert(name("s8"), HealthCheck { port: other, local_endpoints: 1, ..HealthCheck::default() });
    let failures = health.update_those(&wanted, &failing, &[name("s8")].into()).await;
    assert_eq!(failures.len(), 1);
    drop(taken);
    assert!(health.update_those(&wanted, &failing, &BTreeSet::new()).await.is_empty());
    assert_eq!((health.looked_at, health.has_failures()), (1_004, false));
    assert!(!refused(other).await);
}

/// The addresses need not be on any device, and follow the Service.
#[tokio::test]
async fn load_balancers_addresses_are_listened_on_too() {
    let (mut health, _) = server();
    let [port] = free_ports().await;
    let [node, vip, later] = [1, 2, 3].map(|last| IpAddr::from([127, 0, 0, last]));
    let at = |vip: &[IpAddr]| {
        let mut wanted = checks(&[("svc", port, 1)]);
        wanted.get_mut(&name("svc")).unwrap().load_balancer_ips = vip.iter().copied().collect();
        wanted
    };
    let open = async |address| tokio::net::TcpStream::connect(SocketAddr::new(address, port)).await.is_ok();
    let foreign = "203.0.113.1".parse().unwrap();
    assert!(health.update(&at(&[vip, foreign]), &[node].into()).await.is_empty());
    assert_eq!((open(node).await, open(vip).await, open(later).await), (true, true, false));
    assert!(health.update(&at(&[later]), &[node].into()).await.is_empty());
    assert_eq!((open(node).await, open(vip).await, open(later).await), (true, false, true));
    // The unspecified address includes all of them.
    assert!(health.update(&at(&[vip]), &[IpAddr::from([0, 0, 0, 0])].into()).await.is_empty());
    assert_eq!((open(node).await, open(vip).await, open(later).await), (true, true, true));
}

/// Clients with half a request on each of many ports do not delay the run loop.
#[tokio::test]
async fn many_ports_close_at_once() {
    use tokio::io::AsyncWriteExt;
    let (mut health, _) = server();
    let ports: [u16; 40] = free_ports().await;
    let names: Vec<_> = ports.iter().map(|port| format!("s{port}")).collect();
    let wanted: Vec<_> = names.iter().zip(ports).map(|(name, port)| (&name[..], port, 1)).collect();
    assert!(health.update_all(&checks(&wanted)).await.is_empty());
    let mut clients = Vec::new();
    for port in ports {
        let mut client = tokio::net::TcpStream::connect(localhost(port)).await.unwrap();
        client.write_all(b"GET / HTTP/1.1\r\n").await.unwrap();
        clients.push(client);
    }
    until_open(&health.connections, ports.len()).await;
    let nothing = BTreeMap::new();
    let closed = health.update_all(&nothing);
    // One by one, with the grace period of each, it would take 40 s.
    tokio::time::timeout(std::time::Duration::from_secs(10), closed).await.unwrap();
}

/// A connection that existed before the Service was removed sends a request for it.
#[tokio::test]
async fn a_request_that_races_with_deletion_gets_503() {
    let (mut health, proxy) = server();
    proxy.synced();
    let [port] = free_ports().await;
    health.update_all(&checks(&[("svc", port, 1)])).await;
    health.counts.lock().clear();
    let answer = get(localhost(port), "/").await;
    assert!(answer.starts_with("HTTP/1.1 503 "), "{answer}");
}
