//! Inputs of a simulation: its parts, and the delays with which they react to a change.

use std::{collections::BTreeMap, time::Duration};

use traffic_policy_cluster::model::ServiceName;

use super::event::Timed;
use crate::{balancer::Balancer, change::ChangeError, cluster::Cluster, what_if::NODE_GRACE};

/// Requests of one simulation.
pub const MOST_REQUESTS: u64 = 20_000_000;
/// Health checks of one simulation.
const MOST_CHECKS: u128 = 20_000_000;

/// One Service, what happens to it, and who asks for it.
#[derive(Clone, Debug)]
pub struct Simulation<'c> {
    pub cluster: &'c Cluster,
    pub service: &'c ServiceName,
    pub balancer: Balancer,
    pub events: Vec<Timed>,
    pub learn: Learn,
    pub load: Load,
    /// Phases of the balancer's checks, and the endpoint of each request, follow from it.
    pub seed: u64,
    pub measured: Measured,
}

/// Requests, and for how long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Load {
    /// A second.
    pub rate: u32,
    pub lasts: Duration,
    /// From a request to the end of its answer; what it goes through may vanish in between.
    pub request: Duration,
}

/// Delays of everything but the balancer. The defaults are assumptions for a healthy cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Learn {
    /// From an object's change to what an agent has written, and its health ports say.
    pub agent: Duration,
    /// From a pod's change to its EndpointSlice.
    pub endpoints: Duration,
    /// Until Kubernetes takes a silent node for lost.
    pub node_grace: Duration,
    /// From a pod's creation to its being ready.
    pub pod_start: Duration,
    /// Time that a pod goes on serving after its deletion.
    pub pod_stop: Duration,
    /// From an agent's crash to its being back.
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

/// Moments of a run with real agents and a real balancer, that count instead of rate, phases and delays.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Measured {
    /// When requests were sent.
    pub requests: Option<Vec<Duration>>,
    /// When a node's checks began.
    pub checks: BTreeMap<String, Vec<Duration>>,
    /// When a node's agent had written the first change of the objects, the second, and so on.
    pub agents: BTreeMap<String, Vec<Duration>>,
}

/// A simulation that cannot be made.
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

/// A check that is asked more often would never end.
pub(super) const SHORTEST_INTERVAL: Duration = Duration::from_millis(10);
const LONGEST_REQUEST: Duration = Duration::from_secs(3600);

impl Simulation<'_> {
    /// Sizes that end in time.
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
        // Where nothing is asked the interval is none.
        if checks > MOST_CHECKS && !shortest.is_zero() {
            return Err(SimulateError::TooManyChecks(checks));
        }
        Ok(())
    }
}
