//! Inputs of a simulation: its parts, and their delays in reaction to a change.

use std::{collections::BTreeMap, time::Duration};

use traffic_policy_cluster::model::ServiceName;

use super::event::Timed;
use crate::{balancer::Balancer, change::ChangeError, cluster::Cluster, proxy::Proxy, what_if::NODE_GRACE};

/// The largest number of requests in one simulation.
pub const MOST_REQUESTS: u64 = 20_000_000;
/// The largest number of health checks in one simulation.
const MOST_CHECKS: u128 = 20_000_000;

/// One Service, the events that concern it, and its load.
#[derive(Clone, Debug)]
pub struct Simulation<'c> {
    pub cluster: &'c Cluster,
    pub service: &'c ServiceName,
    pub balancer: Balancer,
    /// The proxy on all nodes.
    pub proxy: Proxy,
    pub events: Vec<Timed>,
    pub learn: Learn,
    pub load: Load,
    /// The seed of the random numbers that set the phases of the balancer's checks and the endpoint
    /// of each request.
    pub seed: u64,
    pub measured: Measured,
}

/// The requests, and their duration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Load {
    /// The number of requests per second.
    pub rate: u32,
    pub lasts: Duration,
    /// The time between a request and the end of its answer; the node or pod in its path may vanish
    /// meanwhile.
    pub request: Duration,
}

/// Delays of everything but the balancer. The defaults are assumptions for a healthy cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Learn {
    /// The time between an object's change and the agent's writing it, which its health ports then
    /// report.
    pub agent: Duration,
    /// The time between a pod's change and that of its EndpointSlice.
    pub endpoints: Duration,
    /// The time until Kubernetes considers a silent node lost.
    pub node_grace: Duration,
    /// The time between a pod's creation and its being ready.
    pub pod_start: Duration,
    /// The time that a pod keeps serving after its deletion.
    pub pod_stop: Duration,
    /// The time between an agent's crash and its return.
    pub agent_restart: Duration,
}

impl Default for Learn {
    fn default() -> Self {
        Self {
            agent: Duration::from_millis(100),
            endpoints: Duration::from_millis(500),
            node_grace: NODE_GRACE.value,
            pod_start: Duration::from_secs(5),
            pod_stop: Duration::ZERO,
            agent_restart: Duration::from_secs(5),
        }
    }
}

/// Measured times of a run with real agents and a real balancer, which replace rate, phases and
/// delays.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Measured {
    /// The times at which requests were sent.
    pub requests: Option<Vec<Duration>>,
    /// The times at which a node's checks began.
    pub checks: BTreeMap<String, Vec<Duration>>,
    /// The times at which a node's agent had written the first change of the objects, the second,
    /// and so on.
    pub agents: BTreeMap<String, Vec<Duration>>,
}

/// A simulation that cannot be run.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum SimulateError {
    #[error(
        "Service {0} is not reached from outside: it is of type ClusterIP without externalIPs, or has no port that is served"
    )]
    NotReached(ServiceName),
    #[error("the event at {}s cannot happen: {source}", at.as_secs_f64())]
    Event { at: Duration, source: ChangeError },
    #[error("the event at {}s comes after the end: let it last longer (--for)", .0.as_secs_f64())]
    AfterTheEnd(Duration),
    #[error("{0} requests are too many: at most {MOST_REQUESTS} (rate × time)")]
    TooManyRequests(u64),
    #[error("{0} health checks are too many: at most {MOST_CHECKS} (nodes × time ÷ interval)")]
    TooManyChecks(u128),
    #[error("a request that takes longer than {}s is too long", .0.as_secs())]
    TooLong(Duration),
}

/// The shortest interval of checks: with more frequent ones, a simulation would not finish.
pub(super) const SHORTEST_INTERVAL: Duration = Duration::from_millis(10);
const LONGEST_REQUEST: Duration = Duration::from_secs(3600);

impl Simulation<'_> {
    /// Checks that the simulation finishes in reasonable time.
    pub(super) fn check(&self, nodes: usize) -> Result<(), SimulateError> {
        if let Some(late) = self.events.iter().find(|event| event.at >= self.load.lasts) {
            return Err(SimulateError::AfterTheEnd(late.at));
        }
        if self.load.request > LONGEST_REQUEST {
            return Err(SimulateError::TooLong(LONGEST_REQUEST));
        }
        let requests = u64::from(self.load.rate).saturating_mul(self.load.lasts.as_secs());
        if requests > MOST_REQUESTS {
            return Err(SimulateError::TooManyRequests(requests));
        }
        let shortest = self.balancer.cluster.interval.value.min(self.balancer.local.interval.value);
        let checks =
            nodes as u128 * self.load.lasts.as_millis() / shortest.max(SHORTEST_INTERVAL).as_millis();
        // A balancer without checks has an interval of zero.
        if checks > MOST_CHECKS && !shortest.is_zero() {
            return Err(SimulateError::TooManyChecks(checks));
        }
        Ok(())
    }
}
