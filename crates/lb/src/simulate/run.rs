//! One run: the simulated cluster, the views of its parts, and the event loop.

use std::{
    collections::{BTreeMap, HashMap},
    net::IpAddr,
    time::Duration,
};

use super::{
    agents::{Node, Pod, Version},
    front::Front,
    input::{SimulateError, Simulation},
    line::{Line, Moment},
    queue::{Next, Queue},
    steps::Step,
    tally::{Counts, Second, Tally, Way, Why},
};
use crate::{
    change::{ChangeError, Objects, label},
    judge::Judge,
    overrides::Overrides,
    verdict::Question,
};

/// The results of all requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Simulated {
    pub nodes: Vec<String>,
    pub pods: Vec<String>,
    pub seconds: Vec<Second>,
    pub line: Vec<Moment>,
    /// The reasons why requests were lost or cut.
    pub why: BTreeMap<Why, u64>,
    /// The check that the balancer makes at the start.
    pub question: Question,
    /// The time of each node's first check; the others follow at the balancer's interval.
    pub phases: BTreeMap<String, Duration>,
}

impl Simulated {
    #[must_use]
    pub fn total(&self) -> Counts {
        self.seconds.iter().fold(Counts::default(), |sum, second| sum + second.all)
    }

    /// Returns the requests of each node, by name.
    #[must_use]
    pub fn by_node(&self) -> BTreeMap<&str, Counts> {
        sums(&self.nodes, self.seconds.iter().map(|second| &second.nodes))
    }

    /// Returns the requests of each pod, by name; requests that reached no pod are missing.
    #[must_use]
    pub fn by_pod(&self) -> BTreeMap<&str, Counts> {
        sums(&self.pods, self.seconds.iter().map(|second| &second.pods))
    }
}

fn sums<'n>(
    names: &'n [String],
    seconds: impl Iterator<Item = &'n BTreeMap<usize, Counts>>,
) -> BTreeMap<&'n str, Counts> {
    let mut sums: BTreeMap<&str, Counts> =
        names.iter().map(|name| (name.as_str(), Counts::default())).collect();
    for (number, counts) in seconds.flatten() {
        if let Some(name) = names.get(*number) {
            let sum = sums.entry(name).or_default();
            *sum = *sum + *counts;
        }
    }
    sums
}

impl std::ops::Add for Counts {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self { ok: self.ok + other.ok, lost: self.lost + other.lost, cut: self.cut + other.cut }
    }
}

/// The state of a run.
pub(super) struct Run<'s> {
    pub(super) input: &'s Simulation<'s>,
    pub(super) queue: Queue,
    /// The objects in the API server.
    pub(super) objects: Objects,
    /// The end of the API's outage.
    pub(super) away_until: Duration,
    pub(super) is_published: bool,
    pub(super) versions: Vec<Version>,
    pub(super) nodes: Vec<Node>,
    pub(super) node_of: HashMap<String, usize>,
    pub(super) pods: Vec<Pod>,
    pub(super) pod_of: HashMap<String, usize>,
    pub(super) front: Front,
    pub(super) phases: BTreeMap<String, Duration>,
    pub(super) under_way: BTreeMap<u64, Way>,
    pub(super) tally: Tally,
    pub(super) line: Line,
    pub(super) random: fastrand::Rng,
}

impl Simulation<'_> {
    /// Runs the simulation.
    ///
    /// # Errors
    /// The Service is not reached from outside, an event cannot happen, or the simulation would
    /// take too long.
    pub fn run(&self) -> Result<Simulated, SimulateError> {
        let not_reached = || SimulateError::NotReached(self.service.clone());
        let objects = Objects::of(self.cluster, self.service).ok_or_else(not_reached)?;
        let mut run = Run {
            input: self,
            queue: Queue::default(),
            objects,
            away_until: Duration::ZERO,
            is_published: true,
            versions: Vec::new(),
            nodes: Vec::new(),
            node_of: HashMap::new(),
            pods: Vec::new(),
            pod_of: HashMap::new(),
            front: Front::default(),
            phases: BTreeMap::new(),
            under_way: BTreeMap::new(),
            tally: Tally::new(self.load.lasts),
            line: Line::default(),
            random: fastrand::Rng::with_seed(self.seed),
        };
        run.add_version().ok_or_else(not_reached)?;
        self.check(run.nodes.len())?;
        run.begin();
        let question = run.front.question;
        run.go_on()?;
        Ok(Simulated {
            nodes: run.nodes.into_iter().map(|node| node.name).collect(),
            pods: run.pods.into_iter().map(|pod| pod.name).collect(),
            seconds: run.tally.seconds,
            line: run.line.0,
            why: run.tally.why,
            question,
            phases: run.phases,
        })
    }
}

impl Run<'_> {
    /// Sets everything to a state that has lasted for long: all agents and the balancer know the
    /// objects.
    fn begin(&mut self) {
        for node in 0..self.nodes.len() {
            self.settle(node);
        }
        self.begin_front();
        for number in 0..self.input.events.len() {
            self.queue.push(self.input.events[number].at, Next::Step(Step::Event(number)));
        }
        self.send_next(0);
    }

    fn go_on(&mut self) -> Result<(), SimulateError> {
        while let Some((now, next)) = self.queue.pop() {
            if now >= self.input.load.lasts && self.under_way.is_empty() {
                return Ok(());
            }
            match next {
                Next::Step(step) => {
                    self.step(now, step).map_err(|source| SimulateError::Event { at: now, source })?;
                }
                Next::Publish => self.publish(now),
                Next::Written { node, version } => self.written(now, node, version),
                Next::HandedOn { version } => self.handed_on(now, version),
                Next::Drained { node } => self.drained(now, node),
                Next::Check { node, generation } => self.check(now, node, generation),
                Next::TimedOut { node, generation } => self.timed_out(now, node, generation),
                Next::Done { number } => self.done(number),
                Next::Request { number } => self.request(now, number),
            }
        }
        Ok(())
    }

    /// Adds the current objects as a version. `None` if the Service is no longer reached from
    /// outside.
    pub(super) fn add_version(&mut self) -> Option<usize> {
        let cluster = self.objects.cluster();
        let judge = Judge::new(&cluster, None, Overrides::default());
        let standpoint = judge.standpoint(self.input.service, &self.input.balancer)?;
        for name in standpoint.nodes.keys() {
            self.add_node(name);
        }
        let endpoints: Vec<(IpAddr, String, Option<String>, bool)> = self
            .objects
            .endpoints()
            .map(|endpoint| {
                let serves = endpoint.ready || endpoint.serving;
                (endpoint.address, label(endpoint), endpoint.node_name.as_deref().map(str::to_owned), serves)
            })
            .collect();
        let mut pods = HashMap::new();
        for (address, name, node, serves) in endpoints {
            pods.insert(address, self.add_pod(&name, node.as_deref(), serves));
        }
        self.versions.push(Version { standpoint, pods });
        Some(self.versions.len() - 1)
    }

    pub(super) fn add_node(&mut self, name: &str) -> usize {
        if let Some(known) = self.node_of.get(name) {
            return *known;
        }
        self.nodes.push(Node::new(name));
        self.node_of.insert(name.to_owned(), self.nodes.len() - 1);
        self.nodes.len() - 1
    }

    /// Adds a pod. A new pod serves if its endpoint is serving; a known pod keeps its own state.
    pub(super) fn add_pod(&mut self, name: &str, node: Option<&str>, serves: bool) -> usize {
        if let Some(known) = self.pod_of.get(name) {
            return *known;
        }
        let node = node.map(|node| self.add_node(node));
        self.pods.push(Pod { name: name.to_owned(), node, serves });
        self.pod_of.insert(name.to_owned(), self.pods.len() - 1);
        self.pods.len() - 1
    }

    /// Schedules the publication of changed objects, once all changes of this moment are made.
    pub(super) fn changed(&mut self, now: Duration) {
        if std::mem::take(&mut self.is_published) {
            self.queue.push(now, Next::Publish);
        }
    }

    fn publish(&mut self, now: Duration) {
        if now < self.away_until {
            self.queue.push(self.away_until, Next::Publish);
            return;
        }
        self.is_published = true;
        let Some(version) = self.add_version() else { return };
        for node in 0..self.nodes.len() {
            let moments = self.input.measured.agents.get(&self.nodes[node].name);
            let measured = moments.and_then(|moments| moments.get(version - 1)).copied();
            let at = measured.unwrap_or(now + self.input.learn.agent);
            self.queue.push(at.max(now), Next::Written { node, version });
        }
        self.queue.push(now + self.input.balancer.controller.value, Next::HandedOn { version });
    }

    pub(super) fn node_named(&self, name: &str) -> Result<usize, ChangeError> {
        self.node_of.get(name).copied().ok_or_else(|| ChangeError::NoNode(name.to_owned()))
    }
}
