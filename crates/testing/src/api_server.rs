//! A small Kubernetes API server for tests, with the faults of real ones at a test's command.
//!
//! It serves lists (in pages) and watches (with bookmarks) of Services, EndpointSlices, Nodes and ServiceCIDRs, and
//! takes Events. Connections are HTTP/1.1, or HTTP/2 by TLS. It can be slow, fall silent, cut connections, forget its
//! history (410 Gone), refuse tokens, know no streaming lists, and go away and return.

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

/// A running server. All of it is forgotten when dropped.
#[derive(Debug)]
pub struct ApiServer {
    shared: Arc<Shared>,
    address: SocketAddr,
    certificate: Option<Certificate>,
    /// Network namespace to listen in, if not the one of this process.
    namespace: Option<Namespace>,
    running: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    /// Raised at each change of the state, so that watches and held lists look again.
    changed: watch::Sender<u64>,
    counters: connection::Counters,
}

#[derive(Debug, Default)]
struct State {
    store: Store,
    /// Every request so far, with when it came: method, path and query.
    requests: Vec<(Instant, String)>,
    /// Tokens that are let in; `None` = no token is asked for.
    tokens: Option<BTreeSet<String>>,
    /// Kinds whose lists wait.
    held: BTreeSet<Kind>,
    /// Kinds that are not given, and the status code that says why.
    refused: BTreeMap<Kind, u16>,
    /// Raised to cut all watches.
    cuts: u64,
    /// Connections are taken and kept, and nothing more is sent by them.
    silent: bool,
    /// Kinds whose lists end in mid-body without the connection's end.
    stalled: BTreeSet<Kind>,
    /// A watch from a version that is gone is refused as a whole, not by an event.
    gone_by_status: bool,
    streaming: Streaming,
    /// The cache does not reach the versions that lists ask for.
    behind: bool,
    posted_events: Vec<Value>,
    /// Patches are refused with this status.
    refused_patches: Option<u16>,
}

/// Treatment of `sendInitialEvents`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Streaming {
    /// The objects, and a bookmark behind them.
    #[default]
    Given,
    /// 422, as of a server whose feature gate `WatchList` is off.
    Refused,
    /// The objects without a bookmark, as of a server that is older than the parameter.
    Unknown,
}

impl Shared {
    /// Waits until the server may speak.
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
    ///
    /// # Errors
    ///
    /// If there is no free port.
    pub fn start() -> Result<Self> {
        Self::start_with(None)
    }

    /// Starts an empty server on an address of a namespace, where the nodes of a lab reach it. Called within a runtime
    /// that lives as long as the server.
    ///
    /// # Errors
    ///
    /// If the address is taken or not there.
    pub fn start_in(namespace: &Namespace, address: SocketAddr) -> Result<Self> {
        Self::start_at(Some(namespace.clone()), address, None)
    }

    /// As [`Self::start_in`], with TLS.
    ///
    /// # Errors
    ///
    /// If the address is taken or not there.
    pub fn start_tls_in(
        namespace: &Namespace,
        address: SocketAddr,
        certificate: Certificate,
    ) -> Result<Self> {
        Self::start_at(Some(namespace.clone()), address, Some(certificate))
    }

    /// Like [`Self::start`], with TLS.
    ///
    /// # Errors
    ///
    /// If there is no free port.
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
    ///
    /// # Errors
    ///
    /// If the text is not YAML, or holds something that is not stored.
    pub fn apply(&self, yaml: &str) -> Result<()> {
        documents(yaml)?.into_iter().try_for_each(|object| self.put(object))
    }

    /// Adds or replaces one object.
    ///
    /// # Errors
    ///
    /// If it is of a kind that is not stored.
    pub fn put(&self, object: Value) -> Result<()> {
        let kind = object["kind"].as_str().and_then(Kind::of).context("unknown kind")?;
        self.shared.change(|state| state.store.apply(kind, object));
        Ok(())
    }

    /// Writes a file that names this server, for `--kubeconfig`.
    ///
    /// # Errors
    ///
    /// If the file cannot be written.
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

    /// Removes an object, if it is there; a Node or ServiceCIDR has the empty namespace.
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

    /// Breaks all watches off in mid-stream, as a dying connection does.
    pub fn cut_watches(&self) {
        self.shared.change(|state| state.cuts += 1);
    }

    /// Lets lists of a kind wait until [`Self::release_lists`].
    pub fn hold_lists(&self, kind: Kind) {
        self.shared.change(|state| state.held.insert(kind));
    }

    /// From now on, requests for a kind get this status: 404 as of a server that does not know it, 403 as of a role
    /// that does not name it.
    pub fn refuse(&self, kind: Kind, status: u16) {
        self.shared.change(|state| state.refused.insert(kind, status));
    }

    /// From now on, patches of Nodes are refused with this status, or taken.
    pub fn refuse_patches(&self, status: Option<u16>) {
        self.shared.change(|state| state.refused_patches = status);
    }

    /// An object as it is; a Node has the empty namespace.
    #[must_use]
    pub fn object(&self, kind: Kind, namespace: &str, name: &str) -> Option<Value> {
        self.shared.state().store.get(kind, namespace, name)
    }

    /// Answers the lists that wait.
    pub fn release_lists(&self) {
        self.shared.change(|state| state.held.clear());
    }

    /// From now on only these tokens are let in.
    pub fn require_tokens(&self, tokens: &[&str]) {
        let tokens = tokens.iter().map(|token| (*token).to_owned()).collect();
        self.shared.change(|state| state.tokens = Some(tokens));
    }

    /// Goes on taking connections and requests, and answers nothing, also to watches that are open: as a process that
    /// was stopped, behind a kernel that was not.
    pub fn fall_silent(&self) {
        self.shared.change(|state| state.silent = true);
    }

    /// Answers what waits.
    pub fn speak(&self) {
        self.shared.change(|state| state.silent = false);
    }

    /// From now on lists of a kind stop in mid-body, with the connection open; watches with initial events, too.
    pub fn stall_lists(&self, kind: Kind) {
        self.shared.change(|state| state.stalled.insert(kind));
    }

    /// A watch from a version that is gone is refused by the response's status instead of an event.
    pub fn refuse_gone_versions(&self) {
        self.shared.change(|state| state.gone_by_status = true);
    }

    /// Sets whether the cache lags behind: lists that ask it for a version are refused then.
    pub fn lag_behind(&self, behind: bool) {
        self.shared.change(|state| state.behind = behind);
    }

    /// Sets the treatment of `sendInitialEvents`.
    pub fn stream_lists(&self, streaming: Streaming) {
        self.shared.change(|state| state.streaming = streaming);
    }

    /// From now on it shows this certificate, and checks clients by what it says.
    pub fn replace_certificate(&mut self, certificate: Certificate) {
        self.certificate = Some(certificate);
    }

    /// Goes away: connections break, new ones are refused. The objects stay.
    pub async fn stop(&mut self) {
        if let Some(running) = self.running.take() {
            running.abort();
            let _ = running.await;
        }
    }

    /// Returns on the same address.
    ///
    /// # Errors
    ///
    /// If the port has been taken meanwhile.
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

    /// Every request so far, with when it came: method, path and query.
    #[must_use]
    pub fn requests(&self) -> Vec<(Instant, String)> {
        self.shared.state().requests.clone()
    }

    /// The certificate that it shows, if it has one.
    #[must_use]
    pub fn certificate(&self) -> Option<&str> {
        self.certificate.as_ref().map(|certificate| certificate.pem.as_str())
    }

    /// Number of requests so far with `text` in their path or query.
    #[must_use]
    pub fn requests_with(&self, text: &str) -> usize {
        self.shared.state().requests.iter().filter(|(_, request)| request.contains(text)).count()
    }

    /// Number of lists of a kind, of the whole cluster, that were requested so far: their first pages, and watches that
    /// begin with all objects.
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

/// A socket stays in the namespace that it was made in, whichever thread serves it.
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
