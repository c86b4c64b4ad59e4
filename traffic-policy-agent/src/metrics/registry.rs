//! The answer to a scrape: values stored here by the run loop, or read at the moment of the scrape.

use std::{
    fmt::{self, Debug, Formatter},
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, SystemTime},
};

use anyhow::Result;
use traffic_policy_cluster::{
    model::Index,
    source::{Batch, StatusReader},
};
use traffic_policy_dataplane::{Counter, inspect::ServiceCount};

use super::{
    exposition::Family,
    node::{self, Observed},
    packets, process,
    syncs::Syncs,
};
use crate::health::ProxyHealth;

/// All inputs of a scrape. Cheap to clone; all clones share one state.
#[derive(Clone, Debug)]
pub struct Metrics(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    node_name: String,
    started: SystemTime,
    health: ProxyHealth,
    syncs: Mutex<Syncs>,
    /// State of the run loop; `None` until the maps were written once.
    observed: Mutex<Option<Arc<Observed>>>,
    source: OnceLock<StatusReader>,
    packets: OnceLock<Reader<Counter>>,
    services: OnceLock<Reader<ServiceCount>>,
    /// Scrapes that could not read the packet path's counters.
    unread: AtomicU64,
    /// Number of times that detached programs were attached again.
    restored: AtomicU64,
    nodes_left_out: AtomicU64,
    /// Suspicions of nodes that proved wrong, and right.
    suspicions: [AtomicU64; 2],
}

/// Reads counters at the moment of a scrape.
struct Reader<T>(Box<dyn Fn() -> Result<Vec<T>> + Send + Sync>);

impl<T> Debug for Reader<T> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str("Reader")
    }
}

impl Metrics {
    #[must_use]
    pub fn new(node_name: String, health: ProxyHealth) -> Self {
        let started = SystemTime::now();
        Self(Arc::new(Shared {
            node_name,
            started,
            health,
            syncs: Mutex::new(Syncs::new(started)),
            observed: Mutex::default(),
            source: OnceLock::new(),
            packets: OnceLock::new(),
            services: OnceLock::new(),
            unread: AtomicU64::new(0),
            restored: AtomicU64::new(0),
            nodes_left_out: AtomicU64::new(0),
            suspicions: Default::default(),
        }))
    }

    /// Adds the status of the source to scrapes from now on. Only the first call counts.
    pub fn follow(&self, source: StatusReader) {
        let _ = self.0.source.set(source);
    }

    /// Makes each scrape call `read` for the packet path's counters from now on. Only the first
    /// call counts.
    pub fn count_packets(&self, read: impl Fn() -> Result<Vec<Counter>> + Send + Sync + 'static) {
        let _ = self.0.packets.set(Reader(Box::new(read)));
    }

    /// Makes each scrape call `read` for the counts of Services from now on. Only the first call
    /// counts.
    pub fn count_services(&self, read: impl Fn() -> Result<Vec<ServiceCount>> + Send + Sync + 'static) {
        let _ = self.0.services.set(Reader(Box::new(read)));
    }

    /// Records objects from the source, before they are put into `index`.
    pub fn arriving(&self, batch: &Batch, index: &Index) {
        lock(&self.0.syncs).arriving(batch, index);
    }

    /// Records that a change waits to be written.
    pub fn queued(&self) {
        lock(&self.0.syncs).queued(SystemTime::now());
    }

    /// Records that the maps were written, which took `duration`; `full`: all of them were
    /// compared, not only what changed.
    pub fn synced(&self, duration: Duration, full: bool) {
        let mut syncs = lock(&self.0.syncs);
        syncs.tried(duration, full);
        syncs.succeeded(SystemTime::now());
    }

    /// Records that writing the maps failed after `duration`. Waiting changes continue to wait.
    pub fn failed(&self, duration: Duration, full: bool) {
        lock(&self.0.syncs).tried(duration, full);
    }

    /// Sets the number of times that detached programs were attached again.
    pub fn restored(&self, times: u64) {
        self.0.restored.store(times, Ordering::Relaxed);
    }

    /// Sets the number of dead nodes that are left out.
    pub fn nodes_left_out(&self, nodes: usize) {
        self.0.nodes_left_out.store(nodes as u64, Ordering::Relaxed);
    }

    /// Counts a suspicion of a node; `dead`: it was right.
    pub fn suspicion(&self, dead: bool) {
        self.0.suspicions[usize::from(dead)].fetch_add(1, Ordering::Relaxed);
    }

    /// Stores the state that only the run loop knows.
    pub fn observed(&self, observed: Observed) {
        *lock(&self.0.observed) = Some(Arc::new(observed));
    }

    /// Returns all families, as text.
    #[must_use]
    pub fn render(&self) -> String {
        let shared = &*self.0;
        let mut families = Vec::new();
        families.extend(lock(&shared.syncs).families());
        let observed = lock(&shared.observed).clone();
        families.extend(observed.iter().flat_map(|observed| observed.families()));
        families.extend(node::health(&shared.health));
        families.extend(node::about(&shared.node_name, &shared.health));
        if let Some(source) = shared.source.get() {
            families.extend(node::source(&source.get()));
        }
        families.extend(self.read(&shared.packets, |counters| vec![packets::by_hook(counters)]));
        families.extend(self.read(&shared.services, packets::by_service));
        families.push(
            Family::counter(
                "traffic_policy_map_read_errors_total",
                "Scrapes that could not read counters of the packet path.",
            )
            .with(&[], shared.unread.load(Ordering::Relaxed) as f64),
        );
        families.push(
            Family::counter(
                "traffic_policy_programs_restored_total",
                "Times that programs which somebody had taken off a device or the cgroup were attached again.",
            )
            .with(&[], shared.restored.load(Ordering::Relaxed) as f64),
        );
        families.extend(self.silence());
        families.extend(process::families(shared.started));
        families.iter().map(ToString::to_string).collect()
    }

    fn silence(&self) -> [Family; 2] {
        let left_out = self.0.nodes_left_out.load(Ordering::Relaxed) as f64;
        let [wrong, right] = self.0.suspicions.each_ref().map(|count| count.load(Ordering::Relaxed) as f64);
        [
            Family::gauge(
                "traffic_policy_nodes_left_out",
                "Nodes whose endpoints take no new connections, because they do not answer.",
            )
            .with(&[], left_out),
            Family::counter(
                "traffic_policy_node_suspicions_total",
                "Nodes that were asked because connections to their endpoints were not answered, by result.",
            )
            .with(&[("result", "alive")], wrong)
            .with(&[("result", "dead")], right),
        ]
    }

    fn read<T>(
        &self,
        reader: &OnceLock<Reader<T>>,
        families: impl FnOnce(&[T]) -> Vec<Family>,
    ) -> Vec<Family> {
        let Some(reader) = reader.get() else { return Vec::new() };
        match (reader.0)() {
            Ok(counts) => families(&counts),
            Err(error) => {
                self.0.unread.fetch_add(1, Ordering::Relaxed);
                tracing::debug!("{error:#}");
                Vec::new()
            }
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Each number is valid by itself, whatever a panic interrupted.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use anyhow::bail;

    use super::*;

    fn metrics() -> Metrics {
        Metrics::new("here".to_owned(), ProxyHealth::new(true, true))
    }

    #[test]
    fn counters_that_cannot_be_read_are_left_out_and_told() {
        let metrics = metrics();
        metrics.count_services(|| bail!("no such map"));
        let text = metrics.render();
        assert!(!text.contains("traffic_policy_service_packets_total"), "{text}");
        assert!(text.contains("\ntraffic_policy_map_read_errors_total 1\n"), "{text}");
        assert!(metrics.render().contains("\ntraffic_policy_map_read_errors_total 2\n"));
    }

    #[test]
    fn the_state_ages_while_a_change_waits() {
        let metrics = metrics();
        let age = || -> f64 {
            let text = metrics.render();
            let line = text.lines().find_map(|line| line.strip_prefix("traffic_policy_out_of_sync_seconds "));
            line.unwrap().parse().unwrap()
        };
        // The clock is the machine's: at least this much time has passed then.
        std::thread::sleep(Duration::from_millis(5));
        assert!(age() >= 0.005, "never in sync so far");
        metrics.0.health.synced();
        assert!(age().abs() < f64::EPSILON);
        metrics.0.health.queued();
        std::thread::sleep(Duration::from_millis(5));
        assert!(age() >= 0.005);
    }
}
