//! Scenes to simulate: their inputs, and what the tests ask of their results.

use std::time::Duration;

use super::{by_name, cluster, web};
use crate::{
    Balancer, Cluster, Counts, Learn, Load, Measured, Proxy, SimulateError, Simulated, Simulation, Timed,
    What,
};

pub(super) const SECOND: Duration = Duration::from_secs(1);

/// The inputs of a scene other than its objects.
#[derive(Clone)]
pub(super) struct Scene<'t> {
    pub(super) balancer: Balancer,
    pub(super) proxy: Proxy,
    pub(super) events: &'t [&'t str],
    pub(super) learn: Learn,
    pub(super) load: Load,
    pub(super) seed: u64,
    pub(super) measured: Measured,
}

impl Scene<'_> {
    pub(super) fn new<'t>(balancer: &str, events: &'t [&'t str]) -> Scene<'t> {
        Scene {
            balancer: by_name(balancer).unwrap().clone(),
            proxy: Proxy::default(),
            events,
            learn: Learn::default(),
            load: Load { rate: 100, lasts: SECOND * 60, request: Duration::ZERO },
            seed: 1,
            measured: Measured::default(),
        }
    }

    pub(super) fn run(&self, yaml: &str) -> Result<Simulated, SimulateError> {
        let cluster = cluster(yaml);
        let events = self.events.iter().map(|event| event.parse().unwrap()).collect();
        self.with(&cluster, events)
    }

    pub(super) fn with(&self, cluster: &Cluster, events: Vec<Timed>) -> Result<Simulated, SimulateError> {
        Simulation {
            cluster,
            service: &web(),
            balancer: self.balancer.clone(),
            proxy: self.proxy,
            events,
            learn: self.learn,
            load: self.load,
            seed: self.seed,
            measured: self.measured.clone(),
        }
        .run()
    }
}

/// Returns the times, in seconds, at which the balancer changed its view of a node: `n3 unhealthy`.
pub(super) fn minds(simulated: &Simulated) -> Vec<(f64, String)> {
    let moments = simulated.line.iter().filter_map(|moment| {
        let what = match moment.what {
            What::Unhealthy => "unhealthy",
            What::Healthy => "healthy",
            _ => return None,
        };
        Some((moment.at.as_secs_f64(), format!("{} {what}", moment.nodes.join(" "))))
    });
    moments.collect()
}

pub(super) fn counts(ok: u64, lost: u64, cut: u64) -> Counts {
    Counts { ok, lost, cut, ..Counts::default() }
}
