//! `/healthz`, `/livez` and `/readyz`: whether this node's proxy keeps up, whether load balancers
//! should use the node, and whether a rollout may continue with the next one.

mod leaving;
mod readiness;
mod silence;

use std::{
    collections::BTreeMap,
    io,
    net::SocketAddr,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use hyper::{Request, StatusCode, body::Incoming};
use jiff::Timestamp;
use serde::Serialize;
use traffic_policy_cluster::source::{Stale, Status, StatusReader};

use self::leaving::Farewell;
use super::{
    listener::{Answer, FromHere, Served, json, not_found},
    report::{DirectForwarding, EndpointLeftOut, Facts, Report},
};
use crate::notice::Board;

/// Age at which a waiting change is late.
const LATE: Duration = Duration::from_secs(60);

/// Health of the run loop. Cheap to clone; all clones share one state.
///
/// Before the first [`synced`](Self::synced) the proxy is alive but not healthy: a load balancer
/// must not send yet. Without a waiting change it stays healthy indefinitely, even while the API is
/// unreachable.
#[derive(Clone, Debug)]
pub struct ProxyHealth(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    started: Instant,
    state: Mutex<State>,
    healthz: Answers,
    livez: Answers,
}

/// Numbers of answers with 200 and with 503.
#[derive(Debug, Default)]
struct Answers([AtomicU64; 2]);

impl Answers {
    fn count(&self, ok: bool) {
        self.0[usize::from(!ok)].fetch_add(1, Ordering::Relaxed);
    }

    fn load(&self) -> [(u16, u64); 2] {
        [(200, self.0[0].load(Ordering::Relaxed)), (503, self.0[1].load(Ordering::Relaxed))]
    }
}

/// Numbers of answers to probes by HTTP status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answered {
    pub healthz: [(u16, u64); 2],
    pub livez: [(u16, u64); 2],
}

#[derive(Debug, Default)]
struct State {
    /// Time of the run loop's last beat, once it has begun.
    beat: Option<Instant>,
    /// Time since which the oldest waiting change waits.
    queued: Option<Instant>,
    /// Time at which the maps were last known to hold the desired state.
    updated: Option<Timestamp>,
    node_eligible: bool,
    /// News that this node is about to go.
    board: Board,
    families: Vec<&'static str>,
    /// Status of the source of objects, once it has started.
    source: Option<StatusReader>,
    /// Reason why the last write failed.
    failure: Option<String>,
    /// Programs that were detached and cannot be attached again.
    detached: Option<String>,
    /// Service ports for which the maps have no room.
    left_out: Vec<String>,
    /// Programs that the kernel has refused, while all others serve.
    refused: Option<String>,
    /// Whether no other node answers this one.
    cut_off: bool,
    /// Dead nodes whose endpoints are left out: name, time since which, and what was asked.
    silent: Vec<(String, Instant, String)>,
    /// The endpoints of dead nodes that are left out.
    endpoints_left_out: Vec<EndpointLeftOut>,
    /// The part in direct forwarding, if this node takes any.
    direct: Option<Arc<DirectForwarding>>,
}

impl ProxyHealth {
    /// Makes the health of a proxy; `ipv4` and `ipv6` tell which families are proxied, which
    /// `/healthz` names.
    #[must_use]
    pub fn new(ipv4: bool, ipv6: bool) -> Self {
        let families = [(ipv4, "IPv4"), (ipv6, "IPv6")];
        let families = families.into_iter().filter(|(wanted, _)| *wanted).map(|(_, name)| name).collect();
        Self(Arc::new(Shared {
            started: Instant::now(),
            state: Mutex::new(State { families, ..State::default() }),
            healthz: Answers::default(),
            livez: Answers::default(),
        }))
    }

    /// Records a beat of the run loop, which comes every few seconds at least.
    pub fn beat(&self) {
        self.state().beat = Some(Instant::now());
    }

    /// Records that a change has come that may have to be written. It is not called before the
    /// source has delivered everything: waiting for the API does not count as late.
    pub fn queued(&self) {
        self.state().queued.get_or_insert_with(Instant::now);
    }

    /// Records that the maps hold all that was queued.
    pub fn synced(&self) {
        let mut state = self.state();
        state.queued = None;
        state.updated = Some(Timestamp::now());
        state.failure = None;
    }

    /// Sets the reason why the last write failed, until one succeeds.
    pub fn explain(&self, failure: String) {
        self.state().failure = Some(failure);
    }

    /// Sets which Service ports the last write left out for want of room, with the reasons.
    pub fn left_out(&self, left_out: Vec<String>) {
        self.state().left_out = left_out;
    }

    /// Records that the kernel has refused programs that some Service ports need, and why, or that
    /// it has refused none. The other ports are served, so the proxy is healthy, but a rollout
    /// waits.
    pub fn set_refused(&self, refused: Option<String>) {
        self.state().refused = refused;
    }

    /// Sets the source of objects: `/status` reports what is still missing.
    pub fn follow(&self, source: StatusReader) {
        self.state().source = Some(source);
    }

    /// Returns the report for `/status`.
    #[must_use]
    pub fn report(&self) -> Report {
        let state = self.state();
        let source = state.source.as_ref().map(StatusReader::get);
        Report::new(&Facts {
            updated: state.updated.map(|time| time.to_string()),
            waiting: state.queued.map(|since| since.elapsed()),
            node_eligible: state.node_eligible,
            failure: state.failure.clone(),
            detached: state.detached.clone(),
            left_out: state.left_out.clone(),
            refused: state.refused.clone(),
            cut_off: state.cut_off,
            silent: state.silent.clone(),
            endpoints_left_out: state.endpoints_left_out.clone(),
            leaving: state.board.leaving(),
            deaf: state.board.troubles(),
            direct: state.direct.clone(),
            source,
        })
    }

    /// Records that a write failed and will be tried again: from now on, if not already, a change
    /// is waiting.
    pub fn failed(&self) {
        self.queued();
    }

    /// Records that programs were detached and cannot be attached again, or that all are in place.
    /// Packets are not served meanwhile, which no restart mends: the proxy is alive, and not
    /// healthy.
    pub fn set_detached(&self, detached: Option<String>) {
        self.state().detached = detached;
    }

    /// Sets the part that this node takes in direct forwarding; `None`: it takes none.
    pub fn set_direct(&self, direct: Option<DirectForwarding>) {
        self.state().direct = direct.map(Arc::new);
    }

    /// Returns the part that this node takes in direct forwarding.
    #[must_use]
    pub fn direct(&self) -> Option<Arc<DirectForwarding>> {
        self.state().direct.clone()
    }

    /// Sets whether the Node object allows load balancers to send here. Initially `false`.
    pub fn set_node_eligible(&self, eligible: bool) {
        self.state().node_eligible = eligible;
    }

    /// Whether the maps have been written once, no change is late, and this node is not cut off.
    #[must_use]
    pub fn is_healthy(&self) -> bool {
        self.is_serving(&self.state())
    }

    fn is_serving(&self, state: &State) -> bool {
        state.updated.is_some() && !self.is_late(state) && state.detached.is_none() && !state.cut_off
    }

    /// Returns the time for which the maps have not held the whole desired state: zero while
    /// nothing waits; before the first sync, the time since the start.
    #[must_use]
    pub fn behind(&self) -> Duration {
        let state = self.state();
        let since = if state.updated.is_none() { Some(self.0.started) } else { state.queued };
        since.map_or(Duration::ZERO, |since| since.elapsed())
    }

    /// Returns the numbers of answers to probes so far.
    #[must_use]
    pub fn answered(&self) -> Answered {
        Answered { healthz: self.0.healthz.load(), livez: self.0.livez.load() }
    }

    /// Whether a change waits for too long: one that the run loop knows, or one that it has not
    /// taken from the source.
    fn is_late(&self, state: &State) -> bool {
        let unread = state.source.as_ref().and_then(StatusReader::unread_since);
        self.is_stalled(state) || [state.queued, unread].into_iter().flatten().any(is_long_ago)
    }

    /// Whether the run loop makes no progress.
    fn is_stalled(&self, state: &State) -> bool {
        state.beat.is_some_and(is_long_ago)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // A panic leaves single fields, each valid by itself.
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn healthz(&self) -> Answer {
        let state = self.state();
        let healthy = self.is_serving(&state);
        let eligible = state.node_eligible && state.board.leaving().is_none();
        let ok = healthy && eligible;
        self.0.healthz.count(ok);
        self.answer(&state, healthy, ok, Some(eligible))
    }

    fn livez(&self) -> Answer {
        let state = self.state();
        // A write that fails now would fail after a restart, too: `/healthz` reports it.
        let alive = !self.is_stalled(&state);
        self.0.livez.count(alive);
        self.answer(&state, alive, alive, None)
    }

    fn answer(&self, state: &State, healthy: bool, ok: bool, node_eligible: Option<bool>) -> Answer {
        let now = Timestamp::now();
        let updated = state.updated.map(|time| time.to_string());
        let updated = updated.as_deref().unwrap_or(GO_ZERO_TIME);
        let now = now.to_string();
        let body = Body {
            // Probers that check the age of this value must see it young as long as all is well.
            last_updated: if ok { &now } else { updated },
            current_time: &now,
            node_eligible,
            leaving: node_eligible.and_then(|_| state.board.leaving()).map(Farewell::from),
            healthy,
            stale: stale(state),
            cut_off: state.cut_off,
            left_out: state.silent.iter().map(|(node, ..)| node.as_str()).collect(),
            status: state.updated.map(|_| {
                let family = Family { last_updated: updated, healthy };
                state.families.iter().map(|name| (*name, family)).collect()
            }),
        };
        let status = if ok { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
        // The body has only strings, flags and maps with text keys, which always serialize to JSON.
        json(status, serde_json::to_string(&body).unwrap_or_default())
    }
}

fn is_long_ago(time: Instant) -> bool {
    time.elapsed() >= LATE
}

/// The time that kube-proxy prints before its first update, meaning never.
const GO_ZERO_TIME: &str = "0001-01-01T00:00:00Z";

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Body<'a> {
    last_updated: &'a str,
    current_time: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    node_eligible: Option<bool>,
    /// The news that this node is about to go. kube-proxy's answer has no such member.
    #[serde(skip_serializing_if = "Option::is_none")]
    leaving: Option<Farewell>,
    healthy: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    status: Option<BTreeMap<&'static str, Family<'a>>>,
    /// Kinds of objects that wait to be listed anew, and the reason. kube-proxy's answer has no
    /// such member.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    stale: BTreeMap<&'static str, String>,
    /// Whether no other node answers this one; also beyond kube-proxy's answer, as the next.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    cut_off: bool,
    /// The names of dead nodes whose endpoints are left out.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    left_out: Vec<&'a str>,
}

fn stale(state: &State) -> BTreeMap<&'static str, String> {
    let text = |stale: &Stale| format!("older than {} s: {stale}", stale.since.elapsed().as_secs());
    let kinds = |status: &Status| status.stale.iter().map(|(kind, stale)| (*kind, text(stale))).collect();
    // Probes come often, and a status may name thousands of objects.
    state.source.as_ref().map(|source| source.read(kinds)).unwrap_or_default()
}

#[derive(Clone, Copy, Serialize)]
#[serde(rename_all = "camelCase")]
struct Family<'a> {
    last_updated: &'a str,
    healthy: bool,
}

/// The server of `/healthz`, `/livez`, `/readyz` and `/status`, by default on port 10256.
#[derive(Debug)]
pub struct HealthzServer(Served);

impl HealthzServer {
    /// Starts to answer; the unspecified IPv4 address stands for both families.
    pub fn start(address: SocketAddr, health: ProxyHealth) -> io::Result<Self> {
        let from_here =
            |request: &Request<Incoming>| request.extensions().get().is_some_and(|FromHere(here)| *here);
        Served::start(address, Arc::default(), move |request| match request.uri().path() {
            "/healthz" => health.healthz(),
            "/livez" => health.livez(),
            "/readyz" => health.readyz(from_here(request)),
            // The report has only strings, numbers and flags, which always serialize to JSON. It
            // names API servers and their errors, so it is for this node only.
            "/status" if from_here(request) => {
                json(StatusCode::OK, serde_json::to_string(&health.report()).unwrap_or_default())
            }
            _ => not_found(request.method()),
        })
        .map(Self)
    }

    /// Returns the address listened on, with the port that was chosen if 0 was requested.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.0.address()
    }
}

#[cfg(test)]
mod tests;
