//! `healthCheckNodePort`: for each LoadBalancer Service with policy Local, whether this node has endpoints of it.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    io,
    net::{IpAddr, SocketAddr},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use hyper::{StatusCode, header::HeaderValue};
use tracing::{info, warn};
use traffic_policy_cluster::model::{HealthCheck, ServiceName};

use super::{
    Connections, ProxyHealth,
    listener::{Answer, Served, json},
};

/// A port that cannot be listened on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListenFailure {
    pub service: ServiceName,
    pub port: u16,
    pub error: String,
}

impl ListenFailure {
    /// One sentence, for logs and Events.
    #[must_use]
    pub fn message(&self, node_name: &str) -> String {
        let Self { service, port, error } = self;
        format!("node {node_name} failed to start healthcheck \"{service}\" on port {port}: {error}")
    }
}

/// The listeners of all health-check node ports.
#[derive(Debug)]
pub struct ServiceHealth {
    node_name: String,
    proxy: ProxyHealth,
    counts: Arc<Counts>,
    /// Of all ports together.
    connections: Arc<Connections>,
    open: BTreeMap<ServiceName, Open>,
    failed: BTreeMap<ServiceName, ListenFailure>,
}

/// A port that is listened on, at each of its addresses.
#[derive(Debug)]
struct Open {
    port: u16,
    listeners: BTreeMap<IpAddr, Served>,
}

/// Local endpoints by Service, as the answers read them. A Service that is not here is going away.
#[derive(Debug, Default)]
struct Counts(Mutex<HashMap<ServiceName, usize>>);

impl Counts {
    fn lock(&self) -> MutexGuard<'_, HashMap<ServiceName, usize>> {
        // Each entry is valid by itself, whatever a panic interrupted.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ServiceHealth {
    #[must_use]
    pub fn new(node_name: String, proxy: ProxyHealth) -> Self {
        Self {
            node_name,
            proxy,
            counts: Arc::default(),
            connections: Arc::default(),
            open: BTreeMap::new(),
            failed: BTreeMap::new(),
        }
    }

    /// Opens, closes and moves ports so that `checks` are answered at `addresses` (the unspecified IPv4 one stands for all of
    /// both families) and at the addresses of their own load balancers. Called after the maps are written, so that no answer says 200 before they hold what it promises.
    ///
    /// Returns the ports that cannot be listened on and could, or were not wanted, at the last call: each failure is
    /// logged and returned once, and tried again at each call.
    pub async fn update(
        &mut self,
        checks: &BTreeMap<ServiceName, HealthCheck>,
        addresses: &BTreeSet<IpAddr>,
    ) -> Vec<ListenFailure> {
        *self.counts.lock() =
            checks.iter().map(|(name, check)| (name.clone(), check.local_endpoints)).collect();

        self.close_unwanted(checks, addresses).await;
        self.failed.retain(|name, failure| checks.get(name).is_some_and(|check| check.port == failure.port));

        let mut news = Vec::new();
        for (name, check) in checks {
            self.open(name, check.port, &listen(check, addresses), &mut news);
        }
        news
    }

    /// Closes before others are opened: a port may move from one Service to another.
    async fn close_unwanted(
        &mut self,
        checks: &BTreeMap<ServiceName, HealthCheck>,
        addresses: &BTreeSet<IpAddr>,
    ) {
        let mut closing = Vec::new();
        self.open.retain(|name, open| {
            let check = checks.get(name).filter(|check| check.port == open.port);
            let wanted = check.is_some();
            let addresses = check.map(|check| listen(check, addresses)).unwrap_or_default();
            let (kept, unwanted) = std::mem::take(&mut open.listeners)
                .into_iter()
                .partition(|(address, _)| addresses.contains(address));
            open.listeners = kept;
            let unwanted: BTreeMap<_, _> = unwanted;
            closing.extend(unwanted.into_values());
            if !wanted {
                info!(service = %name, port = open.port, "closing health check port");
            }
            wanted
        });
        // All of them at once.
        closing.iter().for_each(Served::stop);
        for served in closing {
            served.close().await;
        }
    }

    /// Whether a port cannot be listened on at present: then [`Self::update`] should be called again in a while.
    #[must_use]
    pub fn has_failures(&self) -> bool {
        !self.failed.is_empty()
    }

    fn open(
        &mut self,
        name: &ServiceName,
        port: u16,
        addresses: &BTreeSet<IpAddr>,
        news: &mut Vec<ListenFailure>,
    ) {
        let mut failure = None;
        for address in addresses {
            if self.open.get(name).is_some_and(|open| open.listeners.contains_key(address)) {
                continue;
            }
            match self.listen(name, SocketAddr::new(*address, port)) {
                Ok(served) => {
                    let open = self.open.entry(name.clone()).or_insert_with(|| {
                        info!(service = %name, port, "opened health check port");
                        Open { port, listeners: BTreeMap::new() }
                    });
                    open.listeners.insert(*address, served);
                }
                // A kernel without IPv6 has no ::1.
                Err(error) if error.raw_os_error() == Some(libc::EAFNOSUPPORT) => {}
                Err(error) => _ = failure.get_or_insert(error),
            }
        }
        let Some(error) = failure else {
            self.failed.remove(name);
            return;
        };
        let failure = ListenFailure { service: name.clone(), port, error: error.to_string() };
        if self.failed.get(name) != Some(&failure) {
            warn!("{}", failure.message(&self.node_name));
            news.push(failure.clone());
            self.failed.insert(name.clone(), failure);
        }
    }

    fn listen(&self, name: &ServiceName, address: SocketAddr) -> io::Result<Served> {
        let (name, counts, proxy) = (name.clone(), Arc::clone(&self.counts), self.proxy.clone());
        Served::start(address, Arc::clone(&self.connections), move |_| {
            let count = counts.lock().get(&name).copied();
            answer(&name, count.unwrap_or(0), proxy.is_healthy())
        })
    }
}

/// Addresses at which a check is answered: these, and at those of its load balancer, which need not be on any device of the node.
fn listen(check: &HealthCheck, addresses: &BTreeSet<IpAddr>) -> BTreeSet<IpAddr> {
    if addresses.iter().any(IpAddr::is_unspecified) {
        addresses.clone()
    } else {
        addresses | &check.load_balancer_ips
    }
}

/// Byte for byte what kube-proxy answers.
fn answer(name: &ServiceName, count: usize, healthy: bool) -> Answer {
    let ServiceName { namespace, name } = name;
    let body = format!(
        "{{\n\t\"service\": {{\n\t\t\"namespace\": {namespace:?},\n\t\t\"name\": {name:?}\n\t}},\n\
         \t\"localEndpoints\": {count},\n\t\"serviceProxyHealthy\": {healthy}\n}}"
    );
    let ok = count != 0 && healthy;
    let mut answer = json(if ok { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE }, body);
    answer.headers_mut().insert("x-load-balancing-endpoint-weight", HeaderValue::from(count));
    answer
}

#[cfg(test)]
mod tests {
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

    /// Ports that were free a moment ago.
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
        // They swap their ports, in one update.
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
        assert!(
            message.starts_with("node here failed to start healthcheck \"ns/svc\" on port "),
            "{message}"
        );
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
        let open =
            async |address| tokio::net::TcpStream::connect(SocketAddr::new(address, port)).await.is_ok();
        assert!(health.update(&wanted, &[one].into()).await.is_empty());
        assert_eq!((open(one).await, open(two).await), (true, false));
        assert!(health.update(&wanted, &[two].into()).await.is_empty());
        assert_eq!((open(one).await, open(two).await), (false, true));
        assert!(health.update(&BTreeMap::new(), &[two].into()).await.is_empty());
        assert_eq!((open(one).await, open(two).await), (false, false));
    }

    /// They need not be on any device, and follow the Service.
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
        let open =
            async |address| tokio::net::TcpStream::connect(SocketAddr::new(address, port)).await.is_ok();
        let foreign = "203.0.113.1".parse().unwrap();
        assert!(health.update(&at(&[vip, foreign]), &[node].into()).await.is_empty());
        assert_eq!((open(node).await, open(vip).await, open(later).await), (true, true, false));
        assert!(health.update(&at(&[later]), &[node].into()).await.is_empty());
        assert_eq!((open(node).await, open(vip).await, open(later).await), (true, false, true));
        // The unspecified address is all of them.
        assert!(health.update(&at(&[vip]), &[IpAddr::from([0, 0, 0, 0])].into()).await.is_empty());
        assert_eq!((open(node).await, open(vip).await, open(later).await), (true, true, true));
    }

    /// Clients with half a request on each of many ports do not hold up the run loop.
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
        // One by one, with the grace of each, it would take 40 s.
        tokio::time::timeout(std::time::Duration::from_secs(10), closed).await.unwrap();
    }

    /// A connection that was there before the Service went away asks after it.
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
}
