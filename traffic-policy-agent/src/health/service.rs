//! `healthCheckNodePort`: for each LoadBalancer Service with policy Local, whether this node has
//! endpoints of it.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    io,
    net::{IpAddr, SocketAddr},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use hyper::{StatusCode, header::HeaderValue};
use serde_json::Value;
use tracing::{info, warn};
use traffic_policy_cluster::{
    model::{HealthCheck, ServiceName},
    source::Leaving,
};

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
    /// Returns one sentence, for logs and Events.
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
    /// Connections of all ports together.
    connections: Arc<Connections>,
    open: BTreeMap<ServiceName, Open>,
    failed: BTreeMap<ServiceName, ListenFailure>,
    /// Number of checks that were examined, for tests.
    #[cfg(test)]
    looked_at: usize,
}

/// A port that is listened on, at each of its addresses.
#[derive(Debug)]
struct Open {
    port: u16,
    listeners: BTreeMap<IpAddr, Served>,
}

/// Local endpoints by Service, as the answers read them. A Service that is missing is being
/// removed.
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
            #[cfg(test)]
            looked_at: 0,
        }
    }

    /// Opens, closes and moves ports so that `checks` are answered at `addresses` (the unspecified
    /// IPv4 one stands for all of both families) and at the addresses of their own load balancers.
    /// Called after the maps are written, so that no answer is 200 before they hold what it
    /// promises.
    ///
    /// Returns the ports that cannot be listened on and could, or were not wanted, at the last
    /// call: each failure is logged and returned once, and tried again at each call.
    pub async fn update(
        &mut self,
        checks: &BTreeMap<ServiceName, HealthCheck>,
        addresses: &BTreeSet<IpAddr>,
    ) -> Vec<ListenFailure> {
        let answered: Vec<_> = self.counts.lock().keys().cloned().collect();
        let all = checks.keys().cloned().chain(answered).collect();
        self.update_those(checks, addresses, &all).await
    }

    /// Does the same as [`Self::update`] for the checks of these Services, and for those that
    /// failed; all others, and the addresses, are as they were at the last call.
    pub async fn update_those(
        &mut self,
        checks: &BTreeMap<ServiceName, HealthCheck>,
        addresses: &BTreeSet<IpAddr>,
        services: &BTreeSet<ServiceName>,
    ) -> Vec<ListenFailure> {
        let failed: Vec<ServiceName> = self.failed.keys().cloned().collect();
        let concerned: BTreeSet<&ServiceName> = services.iter().chain(&failed).collect();
        #[cfg(test)]
        {
            self.looked_at += concerned.len();
        }
        {
            let mut counts = self.counts.lock();
            for name in &concerned {
                match checks.get(name) {
                    Some(check) => counts.insert((*name).clone(), check.local_endpoints),
                    None => counts.remove(name),
                };
            }
        }
        self.close_unwanted(checks, addresses, &concerned).await;
        for name in &concerned {
            let port = checks.get(name).map(|check| check.port);
            if self.failed.get(name).is_some_and(|failure| port != Some(failure.port)) {
                self.failed.remove(name);
            }
        }
        let mut news = Vec::new();
        for name in concerned {
            if let Some(check) = checks.get(name) {
                self.open(name, check.port, &listen(check, addresses), &mut news);
            }
        }
        news
    }

    /// Closes unwanted ports before others are opened: a port may move from one Service to another.
    async fn close_unwanted(
        &mut self,
        checks: &BTreeMap<ServiceName, HealthCheck>,
        addresses: &BTreeSet<IpAddr>,
        concerned: &BTreeSet<&ServiceName>,
    ) {
        let mut closing = Vec::new();
        for name in concerned {
            let Some(open) = self.open.get_mut(*name) else { continue };
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
                self.open.remove(*name);
            }
        }
        // All ports are stopped at once.
        closing.iter().for_each(Served::stop);
        for served in closing {
            served.close().await;
        }
    }

    /// Whether a port cannot be listened on at present: then [`Self::update`] should be called
    /// again after a while.
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
            answer(&name, count.unwrap_or(0), proxy.is_healthy(), proxy.leaving().as_ref())
        })
    }
}

/// Returns the addresses at which a check is answered: these, and those of its load balancer, which
/// need not be on any device of the node.
fn listen(check: &HealthCheck, addresses: &BTreeSet<IpAddr>) -> BTreeSet<IpAddr> {
    if addresses.iter().any(IpAddr::is_unspecified) {
        addresses.clone()
    } else {
        addresses | &check.load_balancer_ips
    }
}

/// Returns the answer of kube-proxy, byte for byte, as long as the node is not about to go.
fn answer(name: &ServiceName, count: usize, healthy: bool, leaving: Option<&Leaving>) -> Answer {
    let ServiceName { namespace, name } = name;
    let farewell = leaving.map(|leaving| format!(",\n\t\"nodeLeaving\": {}", Value::from(&*leaving.reason)));
    let farewell = farewell.unwrap_or_default();
    let body = format!(
        "{{\n\t\"service\": {{\n\t\t\"namespace\": {namespace:?},\n\t\t\"name\": {name:?}\n\t}},\n\
         \t\"localEndpoints\": {count},\n\t\"serviceProxyHealthy\": {healthy}{farewell}\n}}"
    );
    let ok = count != 0 && healthy && leaving.is_none();
    let mut answer = json(if ok { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE }, body);
    answer.headers_mut().insert("x-load-balancing-endpoint-weight", HeaderValue::from(count));
    answer
}

#[cfg(test)]
mod tests;
