//! A small Kubernetes API server for tests, which shows the faults of real ones on demand.
//!
//! It serves lists (in pages) and watches (with bookmarks) of Services, EndpointSlices, Nodes,
//! ServiceCIDRs and Leases, and accepts Events and Leases. Connections use HTTP/1.1, or HTTP/2 over
//! TLS. The server can be slow, fall silent, cut connections, forget its history (410 Gone), refuse
//! tokens, lack streaming lists, and stop and restart.

mod connection;
mod http;
mod store;
mod tls;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    net::{Ipv4Addr, SocketAddr},
    path::Path,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Instant,
};

use anyhow::{Context, Result};
use serde_json::Value;
use tokio::{net::TcpListener, sync::watch, task::JoinHandle};

pub use self::connection::Traffic;
pub use self::store::Kind;
use self::store::Store;
pub use self::tls::Certificate;
use crate::netns::Namespace;

/// A running server. Its state is lost when it is dropped.
#[derive(Debug)]
pub struct ApiServer {
    shared: Arc<Shared>,
    address: SocketAddr,
    certificate: Option<Certificate>,
    /// The network namespace to listen in, if it is not that of this process.
    namespace: Option<Namespace>,
    running: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    /// Raised at each change of the state, so that watches and held lists look at it again.
    changed: watch::Sender<u64>,
    counters: connection::Counters,
}

#[derive(Debug, Default)]
struct State {
    store: Store,
    /// Every request so far: the time of its arrival, and its method, path and query.
    requests: Vec<(Instant, String)>,
    /// The tokens that are accepted; `None` if no token is required.
    tokens: Option<BTreeSet<String>>,
    /// Kinds whose lists are held back.
    held: BTreeSet<Kind>,
    /// Kinds that are refused, with the status code of the response.
    refused: BTreeMap<Kind, u16>,
    /// Raised to cut all watches.
    cuts: u64,
    /// Whether connections are accepted and kept open while nothing more is sent on them.
    silent: bool,
    /// Kinds whose lists stop in the middle of the body while the connection stays open.
    stalled: BTreeSet<Kind>,
    /// Whether a watch from a version that is gone is refused by its status instead of by an event.
    gone_by_status: bool,
    streaming: Streaming,
    /// Whether the cache lags behind the versions that lists request.
    behind: bool,
    posted_events: Vec<Value>,
    /// The status with which patches are refused.
    refused_patches: Option<u16>,
}

/// The server's answer to a watch with `sendInitialEvents`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Streaming {
    /// Sends the objects, and a bookmark after them.
    #[default]
    Given,
    /// Answers 422, like a server whose feature gate `WatchList` is off.
    Refused,
    /// Sends the objects without a bookmark, like a server that is older than the parameter.
    Unknown,
}

impl Shared {
    /// Waits until the server may send.
    async fn voice(&self) {
        let mut changed = self.changed.subscribe();
        while self.state().silent {
            if changed.changed().await.is_err() {
                return;
            }
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let result = change(&mut self.state());
        self.changed.send_modify(|changes| *changes += 1);
        result
    }
}

impl ApiServer {
    /// Starts an empty server on a free port of the loopback address, without TLS.
    pub fn start() -> Result<Self> {
        Self::start_with(None)
    }

    /// Starts an empty server on an address of a namespace, where the nodes of a lab reach it. Must
    /// be called within a runtime that lives as long as the server.
    pub fn start_in(namespace: &Namespace, address: SocketAddr) -> Result<Self> {
        Self::start_at(Some(namespace.clone()), address, None)
    }

    /// A variant of [`Self::start_in`] with TLS.
    pub fn start_tls_in(
        namespace: &Namespace,
        address: SocketAddr,
        certificate: Certificate,
    ) -> Result<Self> {
        Self::start_at(Some(namespace.clone()), address, Some(certificate))
    }

    /// A variant of [`Self::start`] with TLS.
    pub fn start_tls(certificate: Certificate) -> Result<Self> {
        Self::start_with(Some(certificate))
    }

    fn start_with(certificate: Option<Certificate>) -> Result<Self> {
        Self::start_at(None, SocketAddr::from((Ipv4Addr::LOCALHOST, 0)), certificate)
    }

    fn start_at(
        namespace: Option<Namespace>,
        address: SocketAddr,
        certificate: Option<Certificate>,
    ) -> Result<Self> {
        let listener = listen(namespace.as_ref(), address)?;
        let address = listener.local_addr()?;
        let shared = Arc::new(Shared {
            state: Mutex::default(),
            changed: watch::channel(0).0,
            counters: connection::Counters::default(),
        });
        let mut server = Self { shared, address, certificate, namespace, running: None };
        server.run(listener);
        Ok(server)
    }

    fn run(&mut self, listener: TcpListener) {
        let acceptor = self.certificate.as_ref().map(Certificate::acceptor);
        self.running = Some(tokio::spawn(connection::serve(listener, acceptor, Arc::clone(&self.shared))));
    }

    #[must_use]
    pub fn url(&self) -> String {
        let scheme = if self.certificate.is_some() { "https" } else { "http" };
        format!("{scheme}://{}", self.address)
    }

    /// Adds or replaces the objects of a YAML text with one or more documents.
    pub fn apply(&self, yaml: &str) -> Result<()> {
        documents(yaml)?.into_iter().try_for_each(|object| self.put(object))
    }

    /// Adds or replaces one object.
    pub fn put(&self, object: Value) -> Result<()> {
        let kind = object["kind"].as_str().and_then(Kind::of).context("unknown kind")?;
        self.shared.change(|state| state.store.apply(kind, object));
        Ok(())
    }

    /// Writes a file for `--kubeconfig` that names this server.
    pub fn write_kubeconfig(&self, path: &Path) -> Result<()> {
        let url = self.url();
        let text = format!(
            "apiVersion: v1\nkind: Config\ncurrent-context: c\n\
             clusters: [{{name: c, cluster: {{server: '{url}'}}}}]\n\
             users: [{{name: u, user: {{token: kubeconfig-token}}}}]\n\
             contexts: [{{name: c, context: {{cluster: c, user: u}}}}]\n",
        );
        fs::write(path, text).with_context(|| format!("writing {}", path.display()))
    }

    /// Removes an object, if it exists; a Node or ServiceCIDR has the empty namespace.
    pub fn delete(&self, kind: Kind, namespace: &str, name: &str) {
        self.shared.change(|state| state.store.delete(kind, namespace, name));
    }

    /// Sends a bookmark to all watches.
    pub fn bookmark(&self) {
        self.shared.change(|state| state.store.bookmark());
    }

    /// Forgets all history: a watch from an earlier version gets 410 Gone.
    pub fn compact(&self) {
        self.shared.change(|state| state.store.compact());
    }

    /// Breaks all watches off in the middle of the stream, as a dying connection does.
    pub fn cut_watches(&self) {
        self.shared.change(|state| state.cuts += 1);
    }

    /// Holds lists of a kind back until [`Self::release_lists`].
    pub fn hold_lists(&self, kind: Kind) {
        self.shared.change(|state| state.held.insert(kind));
    }

    /// Answers all further requests for a kind with this status: 404 like a server that does not
    /// know the kind, 403 as for a role that does not name it.
    pub fn refuse(&self, kind: Kind, status: u16) {
        self.shared.change(|state| state.refused.insert(kind, status));
    }

    /// Refuses all further patches of Nodes and writes of Leases with this status, or accepts them
    /// if it is `None`.
    pub fn refuse_patches(&self, status: Option<u16>) {
        self.shared.change(|state| state.refused_patches = status);
    }

    /// The current state of an object; a Node has the empty namespace.
    #[must_use]
    pub fn object(&self, kind: Kind, namespace: &str, name: &str) -> Option<Value> {
        self.shared.state().store.get(kind, namespace, name)
    }

    /// Answers the lists that are held back.
    pub fn release_lists(&self) {
        self.shared.change(|state| state.held.clear());
    }

    /// Accepts these tokens only from now on.
    pub fn require_tokens(&self, tokens: &[&str]) {
        let tokens = tokens.iter().map(|token| (*token).to_owned()).collect();
        self.shared.change(|state| state.tokens = Some(tokens));
    }

    /// Keeps accepting connections and requests but answers nothing, not even on open watches: like
    /// a stopped process behind a running kernel.
    pub fn fall_silent(&self) {
        self.shared.change(|state| state.silent = true);
    }

    /// Ends the silence and answers what is pending.
    pub fn speak(&self) {
        self.shared.change(|state| state.silent = false);
    }

    /// Makes lists of a kind, and watches with initial events, stop in the middle of the body from
    /// now on, with the connection open.
    pub fn stall_lists(&self, kind: Kind) {
        self.shared.change(|state| state.stalled.insert(kind));
    }

    /// Refuses a watch from a version that is gone by the status of the response instead of by an
    /// event.
    pub fn refuse_gone_versions(&self) {
        self.shared.change(|state| state.gone_by_status = true);
    }

    /// Sets whether the cache lags behind: lists that request a version from it are then refused.
    pub fn lag_behind(&self, behind: bool) {
        self.shared.change(|state| state.behind = behind);
    }

    /// Sets how `sendInitialEvents` is treated.
    pub fn stream_lists(&self, streaming: Streaming) {
        self.shared.change(|state| state.streaming = streaming);
    }

    /// Serves this certificate from now on, and checks clients as it demands.
    pub fn replace_certificate(&mut self, certificate: Certificate) {
        self.certificate = Some(certificate);
    }

    /// Stops serving: connections break, new ones are refused. The objects stay.
    pub async fn stop(&mut self) {
        if let Some(running) = self.running.take() {
            running.abort();
            let _ = running.await;
        }
    }

    /// Serves again on the same address.
    pub async fn restart(&mut self) -> io::Result<()> {
        self.stop().await;
        let listener = listen(self.namespace.as_ref(), self.address)?;
        self.run(listener);
        Ok(())
    }

    /// The Events that clients posted.
    #[must_use]
    pub fn posted_events(&self) -> Vec<Value> {
        self.shared.state().posted_events.clone()
    }

    /// Bytes and requests of all connections so far.
    #[must_use]
    pub fn traffic(&self) -> Traffic {
        self.shared.counters.get()
    }

    /// Every request so far: the time of its arrival, and its method, path and query.
    #[must_use]
    pub fn requests(&self) -> Vec<(Instant, String)> {
        self.shared.state().requests.clone()
    }

    /// The certificate of the server, if it has one.
    #[must_use]
    pub fn certificate(&self) -> Option<&str> {
        self.certificate.as_ref().map(|certificate| certificate.pem.as_str())
    }

    /// The number of requests so far with `text` in their path or query.
    #[must_use]
    pub fn requests_with(&self, text: &str) -> usize {
        self.shared.state().requests.iter().filter(|(_, request)| request.contains(text)).count()
    }

    /// The number of lists of a kind, for the whole cluster, that were requested so far: their
    /// first pages, and watches that begin with all objects.
    #[must_use]
    pub fn lists_of(&self, kind: Kind) -> usize {
        let state = self.shared.state();
        let is_list = |(_, request): &&(Instant, String)| {
            request.contains(&format!("/{}?", kind.plural()))
                && !request.contains("/namespaces/")
                && (!request.contains("watch=") || request.contains("sendInitialEvents=true"))
                && !request.contains("continue=")
        };
        state.requests.iter().filter(is_list).count()
    }
}

impl Drop for ApiServer {
    fn drop(&mut self) {
        if let Some(running) = &self.running {
            running.abort();
        }
    }
}

/// Opens a listening socket. A socket stays in the namespace in which it was made, whichever thread
/// serves it.
fn listen(namespace: Option<&Namespace>, address: SocketAddr) -> io::Result<TcpListener> {
    let bind = || std::net::TcpListener::bind(address);
    let listener = namespace.map_or_else(bind, |namespace| namespace.run(bind))?;
    listener.set_nonblocking(true)?;
    TcpListener::from_std(listener)
}

fn documents(yaml: &str) -> Result<Vec<Value>> {
    use serde::Deserialize;

    serde_yaml_ng::Deserializer::from_str(yaml)
        .map(|document| Ok(Value::deserialize(document)?))
        .filter(|object| !matches!(object, Ok(Value::Null)))
        .collect()
}
