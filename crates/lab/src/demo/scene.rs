//! One scene with requests: `lb simulate` foretells it, it is played with the phases and at the moments that were foretold, and simulated
//! again with the moments as they were.

use std::collections::BTreeMap;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use traffic_policy_cluster::model::ServiceName;
use traffic_policy_lb::{self as lb, Learn, Load, Measured, Simulated, Simulation, Timed};
use traffic_policy_testing::recording::{self, Planned, Recorded, Recording, agree, profile};
use traffic_policy_testing::traffic::balancer::Timing;
use traffic_policy_testing::traffic::{Balancer, Target};

use super::cluster::{DemoCluster, RATE};

/// A scene that is yet to be foretold.
pub struct Plan {
    pub service: &'static str,
    /// The load balancer asks what this one asks.
    pub like: lb::Balancer,
    pub timing: Timing,
    pub events: Vec<Timed>,
    /// Delay between a change of the Service and the moment at which the load balancer is told where to ask.
    pub controller: Duration,
    pub lasts: Duration,
}

/// A scene that is foretold.
pub struct Scene<'c> {
    cluster: &'c DemoCluster,
    plan: Plan,
    reaction: Duration,
    pub foretold: Simulated,
}

/// A scene that was played.
pub struct Outcome {
    pub label: String,
    pub recorded: Recorded,
    /// Requests that were to be lost, by the moments that were planned.
    pub foretold: u64,
    /// Requests that are lost in the simulator, with the moments as they were.
    pub replayed: u64,
    /// The largest difference between these moments.
    pub late: Duration,
    /// Of the checks, as they were foretold.
    pub phases: BTreeMap<String, Duration>,
    pub planned: Vec<Timed>,
    service: ServiceName,
    like: lb::Balancer,
    timing: Timing,
}

/// A Service of the demo.
pub fn named(service: &str) -> ServiceName {
    ServiceName { namespace: "default".to_owned(), name: service.to_owned() }
}

impl Plan {
    /// Plays it in the simulator, with the objects as they are. The phases of the checks follow from a seed.
    pub fn foretell(self, cluster: &DemoCluster) -> Result<Scene<'_>> {
        let mut balancer = profile(&self.like, self.timing);
        balancer.controller.value = self.controller;
        let reaction = cluster.reaction();
        let simulation = Simulation {
            cluster: &recording::objects(&cluster.base)?,
            service: &named(self.service),
            balancer,
            events: self.events.clone(),
            learn: Learn { agent: reaction, ..Learn::default() },
            load: Load { rate: RATE, lasts: self.lasts, request: Duration::ZERO },
            seed: 1,
            measured: Measured::default(),
        };
        let foretold = simulation.run()?;
        Ok(Scene { cluster, plan: self, reaction, foretold })
    }
}

impl Scene<'_> {
    /// Starts a load balancer with the phases that were foretold, and requests at the beginning of one of its intervals, once it
    /// sees these nodes.
    pub fn begin(&self, targets: Vec<Target>, healthy: &[&str]) -> Result<Recording> {
        let base = &self.cluster.base;
        let client = base.lab.client().netns();
        let balancer = Balancer::start_in_phase(client, targets, self.plan.timing, &self.foretold.phases);
        ensure!(
            balancer.wait_for(healthy, Duration::from_secs(5)),
            "the load balancer sees {:?}",
            balancer.healthy()
        );
        let total = self.foretold.total().all();
        // Requests begin with an interval of the checks, as in the simulator.
        sleep(balancer.next_interval().saturating_duration_since(Instant::now()));
        Recording::begin(base, balancer, RATE, total)
    }

    /// Waits for a moment of the scene.
    pub fn wait(&self, recording: &Recording, at: Duration) {
        // A moment that was foretold, not a wait for something to happen.
        sleep((recording.start() + at).saturating_duration_since(Instant::now()));
    }

    /// Waits for the last request, and plays it again in the simulator.
    pub fn end(self, recording: Recording, label: &str) -> Result<Outcome> {
        let Self { plan, reaction, foretold, .. } = self;
        let recorded = recording.end();
        let service = named(plan.service);
        let replayed = recorded.simulate(&service, profile(&plan.like, plan.timing))?;
        let planned = Planned {
            events: &plan.events,
            phases: &foretold.phases,
            interval: plan.timing.interval,
            agents: reaction,
            controller: plan.controller,
        };
        Ok(Outcome {
            label: label.to_owned(),
            foretold: foretold.total().lost,
            replayed: replayed.total().lost,
            late: recording::lateness(&recorded, &planned),
            recorded,
            phases: foretold.phases,
            planned: plan.events,
            service,
            like: plan.like,
            timing: plan.timing,
        })
    }
}

impl Outcome {
    /// Requests: all, those that were answered, lost, foretold and replayed. As under [`COLUMNS`].
    pub fn figures(&self) -> String {
        let (all, lost) = (self.recorded.all(), self.recorded.lost());
        format!("{all:>8} {:>6} {lost:>6} {:>9} {:>9}", all - lost, self.foretold, self.replayed)
    }

    /// A sentence if the simulator does not agree, though it was told when everything happened.
    pub fn difference(&self) -> Option<String> {
        let (lost, replayed) = (self.recorded.lost(), self.replayed);
        (!agree(replayed, lost))
            .then(|| format!("{}: {lost} requests were lost, {replayed} in the simulator", self.label))
    }

    /// Lost requests in the simulator if the load balancer took another number of failed checks, and after something that did not happen.
    pub fn replayed_with(&self, failures: u32, before: &[Timed]) -> Result<u64> {
        let timing = Timing { failures, ..self.timing };
        let simulated = self.recorded.simulate_with(&self.service, profile(&self.like, timing), before)?;
        Ok(simulated.total().lost)
    }
}

/// The heading of [`Outcome::figures`].
pub const COLUMNS: &str = "REQUESTS     OK   LOST  FORETOLD  REPLAYED";

/// The meaning of the last two.
pub const MEANING: &str = "(FORETOLD: by `lb simulate` before the scene. REPLAYED: by the same, told when requests and checks, changes and agents really were.)";
