//! A load balancer that follows health checks, with the default timing of the clouds.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval_at};

use super::http;
use crate::netns::{Namespace, Running, Stop};
use crate::pace::poll;

/// A node as a load balancer sees it.
#[derive(Clone, Debug)]
pub struct Target {
    pub node: String,
    /// The address to which requests are sent.
    pub traffic: SocketAddr,
    /// The address of the health check.
    pub health: SocketAddr,
    /// The path of the health check, such as `/healthz`.
    pub path: String,
}

/// The conditions under which a node becomes unhealthy, and healthy again.
#[derive(Clone, Copy, Debug)]
pub struct Timing {
    pub interval: Duration,
    /// The number of consecutive failures that make a node unhealthy; one success makes it healthy.
    pub failures: u32,
}

impl Default for Timing {
    fn default() -> Self {
        Self { interval: Duration::from_secs(1), failures: 3 }
    }
}

/// One change of a node's health.
#[derive(Clone, Debug)]
pub struct Change {
    /// The time since the load balancer's start.
    pub at: Duration,
    pub node: String,
    pub healthy: bool,
    /// The status, or the reason why there was none.
    pub answer: String,
}

/// One health check that was answered, or timed out.
#[derive(Clone, Debug)]
pub struct Check {
    pub node: String,
    pub began: Instant,
    pub ended: Instant,
    /// Whether the check succeeded.
    pub healthy: bool,
}

/// A running load balancer; it stops when dropped.
#[derive(Debug)]
pub struct Balancer {
    state: Arc<Mutex<State>>,
    timing: Timing,
    _running: Running<()>,
}

/// Spreads connections over the healthy nodes; can be passed to a meter.
#[derive(Clone, Debug)]
pub struct Chooser(Arc<Mutex<State>>);

#[derive(Debug)]
struct State {
    start: Instant,
    targets: Vec<Target>,
    healthy: Vec<bool>,
    checks: Vec<Check>,
    changes: Vec<Change>,
}

impl Balancer {
    /// Starts with every node unhealthy; each becomes healthy with its first success. All are
    /// checked at the same time.
    pub fn start(namespace: &Namespace, targets: Vec<Target>, timing: Timing) -> Self {
        Self::start_in_phase(namespace, targets, timing, &BTreeMap::new())
    }

    /// A variant of [`Self::start`] in which the check of each node has a phase: its delay from the
    /// beginning of each interval.
    pub fn start_in_phase(
        namespace: &Namespace,
        targets: Vec<Target>,
        timing: Timing,
        phases: &BTreeMap<String, Duration>,
    ) -> Self {
        let healthy = vec![false; targets.len()];
        let start = Instant::now();
        let state = State { start, targets, healthy, checks: Vec::new(), changes: Vec::new() };
        let state = Arc::new(Mutex::new(state));
        let first: Vec<_> = lock(&state)
            .targets
            .iter()
            .map(|target| start + phases.get(&target.node).copied().unwrap_or_default())
            .collect();
        let shared = state.clone();
        let running = namespace.start("balancer", async move |mut stop: Stop| {
            let mut checks = JoinSet::new();
            for (index, first) in first.into_iter().enumerate() {
                checks.spawn(watch(shared.clone(), index, timing, first));
            }
            stop.requested().await;
        });
        Self { state, timing, _running: running }
    }

    /// The time of the start, to which the times of changes are relative.
    pub fn started(&self) -> Instant {
        lock(&self.state).start
    }

    /// The beginning of the next interval.
    pub fn next_interval(&self) -> Instant {
        let (start, interval) = (self.started(), self.timing.interval);
        let past = start.elapsed().as_nanos() % interval.as_nanos().max(1);
        // The value is less than an interval.
        Instant::now() + interval - Duration::from_nanos(past as u64)
    }

    pub fn chooser(&self) -> Chooser {
        Chooser(self.state.clone())
    }

    /// Checks another port from the next check on; a healthy node stays so until it fails there. A
    /// cloud does this when the policy of a Service changes: the health-check node port exists
    /// under policy Local only.
    pub fn ask_at(&self, port: u16, path: &str) {
        for target in &mut lock(&self.state).targets {
            target.health.set_port(port);
            path.clone_into(&mut target.path);
        }
    }

    /// The names of the healthy nodes.
    pub fn healthy(&self) -> Vec<String> {
        let state = lock(&self.state);
        let pairs = state.targets.iter().zip(&state.healthy);
        pairs.filter(|(_, healthy)| **healthy).map(|(target, _)| target.node.clone()).collect()
    }

    /// Waits until exactly these nodes are healthy; returns false after the time limit, which is
    /// that of a fast machine.
    pub fn wait_for(&self, nodes: &[&str], limit: Duration) -> bool {
        poll(limit, || (self.healthy() == nodes).then_some(())).is_some()
    }

    /// Checks all nodes on another port from now on, as a cloud does when its controller has seen
    /// that the Service got a health port of its own, or lost it.
    pub fn check_on(&self, port: u16) {
        lock(&self.state).targets.iter_mut().for_each(|target| target.health.set_port(port));
    }

    /// Every change of a node's health so far.
    pub fn changes(&self) -> Vec<Change> {
        lock(&self.state).changes.clone()
    }

    /// The number of health checks made so far.
    pub fn checks(&self) -> u64 {
        lock(&self.state).checks.len() as u64
    }

    /// All health checks made so far, each with its time.
    pub fn all_checks(&self) -> Vec<Check> {
        lock(&self.state).checks.clone()
    }
}

impl Chooser {
    /// The address for the n-th connection: the healthy nodes in turn.
    pub fn choose(&self, number: u64) -> Option<SocketAddr> {
        let state = lock(&self.0);
        let pairs = state.targets.iter().zip(&state.healthy);
        let healthy: Vec<_> =
            pairs.filter(|(_, healthy)| **healthy).map(|(target, _)| target.traffic).collect();
        let index = number.checked_rem(healthy.len() as u64)?;
        healthy.get(usize::try_from(index).ok()?).copied()
    }
}

async fn watch(state: Arc<Mutex<State>>, index: usize, timing: Timing, first: Instant) {
    let mut tick = interval_at(first.into(), timing.interval);
    // A late check is made at once, and the phase stays.
    tick.set_missed_tick_behavior(MissedTickBehavior::Skip);
    let mut failures = 0;
    loop {
        tick.tick().await;
        let Target { node, health, path, .. } = lock(&state).targets[index].clone();
        let began = Instant::now();
        let response = http::get(health, &path, timing.interval).await;
        let success = response.as_ref().is_ok_and(|response| response.status == 200);
        failures = if success { 0 } else { failures + 1 };
        let mut state = lock(&state);
        state.checks.push(Check { node: node.clone(), began, ended: Instant::now(), healthy: success });
        let was = state.healthy[index];
        let is = success || (was && failures < timing.failures);
        if was != is {
            let answer =
                response.map_or_else(|error| format!("{error:#}"), |response| response.status.to_string());
            state.healthy[index] = is;
            let change = Change { at: state.start.elapsed(), node, healthy: is, answer };
            state.changes.push(change);
        }
    }
}

fn lock(state: &Mutex<State>) -> std::sync::MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}
