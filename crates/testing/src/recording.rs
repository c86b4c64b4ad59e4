//! Recordings of scenes that are played in the lab, for `lb simulate` to play them again: when
//! requests were sent, when checks began, when something was changed, and when the agents had
//! written it. The simulator has to find out by itself how each request ends, and when the balancer
//! changes its mind.

mod order;
mod synced;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use traffic_policy_cluster::model::{Index, ServiceName};
use traffic_policy_cluster::source;
use traffic_policy_lb::{self as lb, Event, Learn, Load, Measured, Proxy, Simulated, Simulation, Timed};

use self::order::{Happening, TimedCheck};
pub use self::synced::{Synced, last_sync};
use crate::cluster::Cluster;
use crate::lab::Family;
use crate::netns::Namespace;
use crate::pace::scaled;
use crate::traffic::balancer::{Check, Timing};
use crate::traffic::connections::Report;
use crate::traffic::{Balancer, NewConnections};

/// The port on which every agent answers /healthz.
const HEALTHZ: u16 = 10256;
/// The longest time by which a health port lags behind the maps: less than the duration of a check,
/// on a busy machine.
const NOTICE: Duration = Duration::from_millis(250);

/// The time after which a client gives up, on a fast machine: that of the clients of `lb simulate`.
const PATIENCE: Duration = Duration::from_secs(3);

/// A scene while it is played: its clock, and the events so far.
pub struct Recording {
    nodes: Vec<(String, SocketAddr)>,
    client: Namespace,
    balancer: Balancer,
    objects: lb::Cluster,
    start: Instant,
    rate: u32,
    sent: Arc<Mutex<Vec<Instant>>>,
    meter: NewConnections,
    happened: Vec<Happened>,
    controller: Option<Happening>,
}

/// One event.
struct Happened {
    event: Event,
    when: Happening,
    /// The numbers of the nodes whose checks may notice the event at once.
    noticed_at: Vec<usize>,
    /// The moments at which the agent of each node had written it, if it is a change of objects.
    written: Vec<Happening>,
}

/// A finished scene.
pub struct Recorded {
    pub balancer: Balancer,
    pub report: Report,
    /// The beginning of the scene; measured moments are relative to it.
    pub start: Instant,
    pub events: Vec<Timed>,
    pub measured: Measured,
    /// The delay between the last change and the moment at which the balancer was given another
    /// health check.
    pub controller: Duration,
    objects: lb::Cluster,
    rate: u32,
}

impl Recording {
    /// Begins a scene with `rate` requests a second, `total` in all, to the nodes that the balancer
    /// chooses.
    pub fn begin(cluster: &Cluster, balancer: Balancer, rate: u32, total: u64) -> Result<Self> {
        let nodes = cluster.lab.nodes().iter();
        let nodes = nodes.map(|node| (node.name.clone(), SocketAddr::new(node.address(Family::V4), HEALTHZ)));
        let client = cluster.lab.client().netns().clone();
        let (start, sent) = (Instant::now(), Arc::new(Mutex::new(Vec::new())));
        let (chooser, shared) = (balancer.chooser(), sent.clone());
        let choose = move |number| {
            shared.lock().unwrap_or_else(PoisonError::into_inner).push(Instant::now());
            chooser.choose(number)
        };
        Ok(Self {
            nodes: nodes.collect(),
            objects: objects(cluster)?,
            meter: NewConnections::start_patient(&client, rate, total, scaled(PATIENCE), choose),
            client,
            start,
            rate,
            sent,
            happened: Vec::new(),
            controller: None,
            balancer,
        })
    }

    pub fn start(&self) -> Instant {
        self.start
    }

    pub fn balancer(&self) -> &Balancer {
        &self.balancer
    }

    /// The number of requests that were sent so far.
    pub fn sent(&self) -> u64 {
        self.sent.lock().unwrap_or_else(PoisonError::into_inner).len() as u64
    }

    /// Whether the first `first` requests have ended.
    pub fn are_over(&self, first: u64) -> bool {
        self.meter.are_over(first)
    }

    /// Performs an event that no object shows. Returns the numbers of the nodes whose checks may
    /// fail or succeed from then on.
    pub fn happens(
        &mut self,
        event: Event,
        noticed_at: &[usize],
        act: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let when = during(act)?;
        let noticed_at = noticed_at.to_vec();
        self.happened.push(Happened { event, when, noticed_at, written: Vec::new() });
        Ok(())
    }

    /// Changes objects, and waits until every agent has written the change.
    pub fn changes(&mut self, event: Event, act: impl FnOnce() -> Result<()>) -> Result<()> {
        let since = Synced::now();
        let when = during(act)?;
        let written = self.nodes.iter().map(|(_, healthz)| {
            let at = since.next(&self.client, *healthz)?;
            // The write cannot precede the change; it is no later than the moment that the agent
            // reports.
            Ok(Happening { from: when.from, to: at, at })
        });
        let written = written.collect::<Result<_>>()?;
        self.happened.push(Happened { event, when, noticed_at: Vec::new(), written });
        Ok(())
    }

    /// Tells the balancer where to check, as the cloud's controller does once it has seen the last
    /// change.
    pub fn controller_asks(&mut self, port: u16, path: &str) -> Result<()> {
        let balancer = &self.balancer;
        let when = during(|| {
            balancer.ask_at(port, path);
            Ok(())
        });
        self.controller = Some(when?);
        Ok(())
    }

    /// Waits for the last request.
    pub fn end(self) -> Recorded {
        let Self { nodes, balancer, objects, start, rate, sent, meter, mut happened, mut controller, .. } =
            self;
        let report = meter.wait();
        let mut checks: Vec<Vec<TimedCheck>> = nodes.iter().map(|_| Vec::new()).collect();
        for Check { node, began, ended, healthy } in balancer.all_checks() {
            if let Some(number) = nodes.iter().position(|(name, _)| *name == node) {
                checks[number].push(TimedCheck { began, ended, healthy, at: began });
            }
        }
        for number in 0..happened.len() {
            let next = happened.get(number + 1).map(|next| next.when.from);
            let until = |when: &Happening| next.map_or(when.to + NOTICE, |next| next.min(when.to + NOTICE));
            let Happened { when, noticed_at, written, .. } = &mut happened[number];
            order::settle(when, until(when), &mut checks, noticed_at);
            for (node, written) in written.iter_mut().enumerate() {
                order::settle(written, until(written), &mut checks, &[node]);
            }
        }
        if let Some(when) = &mut controller {
            let all: Vec<usize> = (0..nodes.len()).collect();
            order::settle(when, when.to + NOTICE, &mut checks, &all);
        }
        let since = |at: Instant| at.saturating_duration_since(start);
        let requests =
            sent.lock().unwrap_or_else(PoisonError::into_inner).iter().map(|at| since(*at)).collect();
        let mut measured = Measured { requests: Some(requests), ..Measured::default() };
        for (number, ((name, _), checks)) in nodes.into_iter().zip(checks).enumerate() {
            let within = checks.into_iter().filter(|check| check.at >= start);
            measured.checks.insert(name.clone(), within.map(|check| since(check.at)).collect());
            let written = happened.iter().filter_map(|happened| happened.written.get(number));
            measured.agents.insert(name, written.map(|written| since(written.at)).collect());
        }
        let last = happened.last().map_or(start, |last| last.when.at);
        let controller = controller.map(|when| when.at.saturating_duration_since(last)).unwrap_or_default();
        let events =
            happened.into_iter().map(|one| Timed { at: since(one.when.at), event: one.event }).collect();
        Recorded { balancer, report, start, events, measured, controller, objects, rate }
    }
}

impl Recorded {
    /// The number of requests that failed, or would have: one whose first segment was dropped
    /// counts as lost, even if it was answered after a retransmission.
    pub fn lost(&self) -> u64 {
        self.report.failed + self.report.resent
    }

    pub fn all(&self) -> u64 {
        self.report.ok + self.report.failed
    }

    /// Plays the scene in the simulator, with the moments that were measured.
    pub fn simulate(&self, service: &ServiceName, balancer: lb::Balancer) -> Result<Simulated> {
        self.simulate_with(service, balancer, &[])
    }

    /// A variant of [`Self::simulate`] with events before it that did not happen.
    pub fn simulate_with(
        &self,
        service: &ServiceName,
        mut balancer: lb::Balancer,
        before: &[Timed],
    ) -> Result<Simulated> {
        balancer.controller.value = self.controller;
        let requests = self.measured.requests.iter().flatten().copied();
        let last = requests.chain(self.events.iter().map(|event| event.at)).max().unwrap_or_default();
        // A request that is sent in the last moment counts, too.
        let lasts = last + Duration::from_secs(1);
        let simulation = Simulation {
            cluster: &self.objects,
            service,
            balancer,
            proxy: Proxy::default(),
            events: before.iter().chain(&self.events).cloned().collect(),
            learn: Learn::default(),
            load: Load { rate: self.rate, lasts, request: Duration::ZERO },
            seed: 1,
            measured: self.measured.clone(),
        };
        simulation.run().context("the simulator refuses the scene")
    }
}

/// Returns the objects that the agents of a cluster follow.
pub fn objects(cluster: &Cluster) -> Result<lb::Cluster> {
    objects_in(cluster.manifests.folder())
}

/// Returns the objects of a folder of manifests.
pub fn objects_in(folder: &Path) -> Result<lb::Cluster> {
    let mut index = Index::default();
    source::read_cluster(folder)?.apply(&mut index);
    Ok(lb::Cluster::new(index))
}

/// The lab's load balancer as a profile; its health check is that of `like`.
pub fn profile(like: &lb::Balancer, timing: Timing) -> lb::Balancer {
    let mut balancer = like.clone();
    for check in [&mut balancer.cluster, &mut balancer.local] {
        check.interval.value = timing.interval;
        check.timeout.value = timing.interval;
        check.failures.value = timing.failures;
        check.successes.value = 1;
    }
    balancer.controller.value = Duration::ZERO;
    balancer
}

/// Whether the numbers of lost requests agree: within 5 %, or 3.
pub fn agree(simulated: u64, happened: u64) -> bool {
    simulated.abs_diff(happened) <= allowed(happened)
}

/// The difference that is allowed between both numbers.
pub fn allowed(happened: u64) -> u64 {
    (happened / 20).max(3)
}

/// The largest difference of a scene from its plan: of checks, events, agents, controller and
/// requests.
pub fn lateness(recorded: &Recorded, planned: &Planned<'_>) -> Duration {
    let Planned { events, phases, interval, agents, controller } = *planned;
    let mut late = recorded.controller.abs_diff(controller);
    for (happened, planned) in recorded.events.iter().zip(events) {
        late = late.max(happened.at.abs_diff(planned.at));
    }
    for written in recorded.measured.agents.values() {
        for (written, planned) in written.iter().zip(events) {
            late = late.max(written.abs_diff(planned.at + agents));
        }
    }
    for (node, checks) in &recorded.measured.checks {
        let phase = phases.get(node).copied().unwrap_or_default();
        for check in checks {
            let off = (*check + interval).saturating_sub(phase).as_nanos() % interval.as_nanos().max(1);
            let off = Duration::from_nanos(off as u64);
            late = late.max(off.min(interval - off));
        }
    }
    let gap = Duration::from_secs(1) / recorded.rate.max(1);
    for (number, sent) in recorded.measured.requests.iter().flatten().enumerate() {
        late = late.max(sent.abs_diff(gap * u32::try_from(number).unwrap_or(u32::MAX)));
    }
    late
}

/// The planned moments of a scene.
#[derive(Clone, Copy)]
pub struct Planned<'p> {
    pub events: &'p [Timed],
    pub phases: &'p BTreeMap<String, Duration>,
    pub interval: Duration,
    /// The time from a change to the maps.
    pub agents: Duration,
    pub controller: Duration,
}

/// The moment of an action, taken to be in the middle of its duration.
fn during(act: impl FnOnce() -> Result<()>) -> Result<Happening> {
    let from = Instant::now();
    act()?;
    let to = Instant::now();
    Ok(Happening { from, to, at: from + (to - from) / 2 })
}

#[cfg(test)]
mod tests {
    use super::agree;

    #[test]
    fn lost_requests_agree_within_5_percent_or_3() {
        for (simulated, happened, wanted) in [
            (0, 3, true),
            (0, 4, false),
            (3, 0, true),
            (4, 0, false),
            (210, 200, true),
            (211, 200, false),
            (189, 200, false),
        ] {
            assert_eq!(agree(simulated, happened), wanted, "{simulated} {happened}");
        }
    }
}
