//! One scene with requests: `lb simulate` predicts it, it is played with the predicted phases and
//! at the predicted moments, and it is simulated again with the actual moments.

use std::collections::BTreeMap;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use traffic_policy_cluster::model::ServiceName;
use traffic_policy_lb::{self as lb, Learn, Load, Measured, Proxy, Simulated, Simulation, Timed};
use traffic_policy_testing::recording::{self, Planned, Recorded, Recording, agree, profile};
use traffic_policy_testing::traffic::balancer::Timing;
use traffic_policy_testing::traffic::{Balancer, Target};

use super::cluster::{DemoCluster, RATE};

/// A scene that is yet to be predicted.
pub struct Plan {
    pub service: &'static str,
    /// The balancer whose checks the load balancer copies.
    pub like: lb::Balancer,
    pub timing: Timing,
    pub events: Vec<Timed>,
    /// Delay between a change of the Service and the moment at which the load balancer learns where
    /// to check.
    pub controller: Duration,
    pub lasts: Duration,
}

/// A scene that has been predicted.
pub struct Scene<'c> {
    cluster: &'c DemoCluster,
    plan: Plan,
    reaction: Duration,
    pub predicted: Simulated,
}

/// A scene that was played.
pub struct Outcome {
    pub label: String,
    pub recorded: Recorded,
    /// Number of requests predicted as lost, from the planned moments.
    pub predicted: u64,
    /// Number of requests that are lost in the simulator, with the actual moments.
    pub replayed: u64,
    /// The largest difference between planned and actual moments.
    pub late: Duration,
    /// Phases of the checks, as predicted.
    pub phases: BTreeMap<String, Duration>,
    pub planned: Vec<Timed>,
    service: ServiceName,
    like: lb::Balancer,
    timing: Timing,
}

/// Returns the name of a Service of the demo.
pub fn named(service: &str) -> ServiceName {
    ServiceName { namespace: "default".to_owned(), name: service.to_owned() }
}

impl Plan {
    /// Plays the scene in the simulator, with the current objects. The phases of the checks follow
    /// from a seed.
    pub fn predict(self, cluster: &DemoCluster) -> Result<Scene<'_>> {
        let mut balancer = profile(&self.like, self.timing);
        balancer.controller.value = self.controller;
        let reaction = cluster.reaction();
        let simulation = Simulation {
            cluster: &recording::objects(&cluster.base)?,
            service: &named(self.service),
            balancer,
            proxy: Proxy::default(),
            events: self.events.clone(),
            learn: Learn { agent: reaction, ..Learn::default() },
            load: Load { rate: RATE, lasts: self.lasts, request: Duration::ZERO },
            seed: 1,
            measured: Measured::default(),
        };
        let predicted = simulation.run()?;
        Ok(Scene { cluster, plan: self, reaction, predicted })
    }
}

impl Scene<'_> {
    /// Starts a load balancer with the predicted phases, and requests at the beginning of one of
    /// its intervals, once it sees these nodes as healthy.
    pub fn begin(&self, targets: Vec<Target>, healthy: &[&str]) -> Result<Recording> {
        let base = &self.cluster.base;
        let client = base.lab.client().netns();
        let balancer = Balancer::start_in_phase(client, targets, self.plan.timing, &self.predicted.phases);
        ensure!(
            balancer.wait_for(healthy, Duration::from_secs(5)),
            "the load balancer sees {:?}",
            balancer.healthy()
        );
        let total = self.predicted.total().all();
        // Requests begin with an interval of the checks, as in the simulator.
        sleep(balancer.next_interval().saturating_duration_since(Instant::now()));
        Recording::begin(base, balancer, RATE, total)
    }

    /// Waits for a moment of the scene.
    pub fn wait(&self, recording: &Recording, at: Duration) {
        // This is a predicted moment, not a wait for an event.
        sleep((recording.start() + at).saturating_duration_since(Instant::now()));
    }

    /// Waits for the last request, and repeats the scene in the simulator.
    pub fn end(self, recording: Recording, label: &str) -> Result<Outcome> {
        let Self { plan, reaction, predicted, .. } = self;
        let recorded = recording.end();
        let service = named(plan.service);
        let replayed = recorded.simulate(&service, profile(&plan.like, plan.timing))?;
        let planned = Planned {
            events: &plan.events,
            phases: &predicted.phases,
            interval: plan.timing.interval,
            agents: reaction,
            controller: plan.controller,
        };
        Ok(Outcome {
            label: label.to_owned(),
            predicted: predicted.total().missed(),
            replayed: replayed.total().missed(),
            late: recording::lateness(&recorded, &planned),
            recorded,
            phases: predicted.phases,
            planned: plan.events,
            service,
            like: plan.like,
            timing: plan.timing,
        })
    }
}

impl Outcome {
    /// Returns the numbers of requests: all, answered, lost, predicted and replayed, as under
    /// [`COLUMNS`].
    pub fn figures(&self) -> String {
        let (all, lost) = (self.recorded.all(), self.recorded.lost());
        format!("{all:>8} {:>6} {lost:>6} {:>9} {:>9}", all - lost, self.predicted, self.replayed)
    }

    /// Returns a sentence if the simulator disagrees even with the actual moments.
    pub fn difference(&self) -> Option<String> {
        let (lost, replayed) = (self.recorded.lost(), self.replayed);
        (!agree(replayed, lost))
            .then(|| format!("{}: {lost} requests were lost, {replayed} in the simulator", self.label))
    }

    /// Returns the lost requests in the simulator with another number of failed checks for the load
    /// balancer, and after events that did not happen.
    pub fn replayed_with(&self, failures: u32, before: &[Timed]) -> Result<u64> {
        let timing = Timing { failures, ..self.timing };
        let simulated = self.recorded.simulate_with(&self.service, profile(&self.like, timing), before)?;
        Ok(simulated.total().missed())
    }
}

/// The heading of [`Outcome::figures`].
pub const COLUMNS: &str = "REQUESTS     OK   LOST PREDICTED  REPLAYED";

/// The meaning of the last two columns.
pub const MEANING: &str = "(PREDICTED: by `lb simulate` before the scene. REPLAYED: by the same, told when requests and checks, changes and agents really were.)";
