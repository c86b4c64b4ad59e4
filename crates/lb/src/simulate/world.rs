//! The cluster of a simulation: the objects in the API server, the machines and pods as they are,
//! and what each step does to them.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, VecDeque},
    time::Duration,
};

use traffic_policy_cluster::model::ServiceName;

use super::{
    effect::{Effect, Through},
    event::{Event, PodEvent},
    input::{Learn, Simulation},
    line::What,
    machines::Machines,
    queue::Next,
    step::Step,
    tally::Why,
    version::Version,
};
use crate::{
    balancer::Balancer,
    change::{Change, ChangeError, NodeChange, Objects, PodState, RemovedNode, label},
    judge::{Judge, Standpoint},
    overrides::Overrides,
    proxy::Proxy,
};

/// Objects, machines and pods.
#[derive(Debug)]
pub(super) struct World<'s> {
    service: &'s ServiceName,
    balancer: &'s Balancer,
    learn: &'s Learn,
    proxy: Proxy,
    /// The objects in the API server.
    objects: Objects,
    /// The Nodes that Kubernetes takes for lost, and their endpoints.
    lost: BTreeMap<String, RemovedNode>,
    /// The machines whose agents have said that they will go.
    leaving: BTreeSet<usize>,
    /// The end of the API's outage.
    away_until: Duration,
    machines: Machines,
}

/// The effects of a step; it fails if an event cannot happen.
type Outcome = Result<Vec<Effect>, ChangeError>;

impl<'s> World<'s> {
    pub(super) fn new(input: &'s Simulation<'s>, objects: Objects) -> Self {
        Self {
            service: input.service,
            balancer: &input.balancer,
            learn: &input.learn,
            proxy: input.proxy,
            objects,
            lost: BTreeMap::new(),
            leaving: BTreeSet::new(),
            away_until: Duration::ZERO,
            machines: Machines::default(),
        }
    }

    pub(super) fn machines(&self) -> &Machines {
        &self.machines
    }

    /// Returns the end of the API's outage while it lasts.
    pub(super) fn away(&self, now: Duration) -> Option<Duration> {
        (now < self.away_until).then_some(self.away_until)
    }

    /// Returns the current objects as a version, and adds the machines and pods that are new in it.
    /// `None` if the Service is no longer reached from outside.
    pub(super) fn next_version(&mut self) -> Option<Version> {
        if self.proxy.is_kube_proxy() {
            self.objects.forget_annotations();
        }
        let cluster = self.objects.cluster();
        let judge = Judge::new(&cluster, None, Overrides::default());
        let standpoint = judge.standpoint(self.service, self.balancer)?;
        for name in standpoint.nodes.keys() {
            self.machines.add_node(name);
        }
        let (mut pods, mut hosts) = (HashMap::new(), BTreeSet::new());
        for endpoint in self.objects.endpoints() {
            let serves = endpoint.ready || endpoint.serving;
            let pod = self.machines.add_pod(&label(endpoint), endpoint.node_name.as_deref(), serves);
            pods.insert(endpoint.address, pod);
            hosts.extend(self.machines.pods()[pod].node.filter(|_| serves));
        }
        Some(Version { standpoint, pods, hosts, leaving: self.leaving.clone() })
    }

    /// Removes the machines that have been silent for long.
    pub(super) fn settle(&mut self, standpoint: &Standpoint) {
        for node in 0..self.machines.nodes().len() {
            let on_node = standpoint.nodes.get(&self.machines.nodes()[node].name);
            if on_node.is_some_and(|on_node| on_node.silent) {
                self.machines.vanish(node);
            }
        }
    }

    /// Executes a step; one that needs the API waits while that is away.
    pub(super) fn step(&mut self, now: Duration, step: Step) -> Outcome {
        if step.needs_api()
            && let Some(later) = self.away(now)
        {
            return Ok(vec![Effect::Later(later, Next::Step(step))]);
        }
        Ok(match step {
            Step::Event(event) => return self.event(now, &event),
            Step::Stopped(pod) => self.stop(pod),
            Step::AgentBack(node) => vec![Effect::Restarted(node)],
            Step::Withdrawn(node, since) => match self.is_silent_since(node, since) {
                true => vec![Effect::Withdrawn(node)],
                false => Vec::new(),
            },
            Step::ApiBack => vec![Effect::Note(What::ApiBack, None)],
            Step::TakenForLost(node, since) if !self.is_silent_since(node, since) => Vec::new(),
            Step::TakenForLost(node, _) => {
                let name = self.machines.nodes()[node].name.clone();
                self.lost.insert(name.clone(), self.objects.remove_node(&name)?);
                vec![Effect::Note(What::TakenForLost, Some(name)), Effect::Changed]
            }
            Step::Serves(pod) => {
                self.machines.serve(pod);
                Vec::new()
            }
            Step::PodReady(pod) => {
                self.objects.set_pod(&pod, PodState::Ready);
                vec![Effect::Note(What::PodReady(pod), None), Effect::Changed]
            }
            Step::PodTerminates(pod) => {
                self.objects.set_pod(&pod, PodState::Terminating);
                vec![Effect::Changed]
            }
            Step::PodRemoved(pod) => {
                self.objects.remove_pod(&pod);
                vec![Effect::Changed]
            }
            Step::Delete(pod) => self.delete(now, &pod),
            Step::Replace(rest) => return self.replace(now, rest),
        })
    }

    fn event(&mut self, now: Duration, event: &Event) -> Outcome {
        if let Some(node) = event.node()
            && !matches!(event, Event::Change(Change::Node(_, NodeChange::Added)))
        {
            self.machines.node_named(node)?;
        }
        let mut effects = vec![Effect::Note(What::Event(event.clone()), event.node().map(str::to_owned))];
        match event {
            Event::Change(Change::Node(name, NodeChange::Gone)) => effects.extend(self.vanish(now, name)?),
            Event::CutOff(name) => effects.extend(self.isolate(now, name)?),
            Event::Back(name) => effects.extend(self.come_back(name)?),
            Event::Notice(name) => effects.extend(self.give_notice(name)?),
            Event::Change(Change::Node(name, NodeChange::Drained)) => {
                let moved = self.moved(&Change::Node(name.clone(), NodeChange::Drained))?;
                self.objects.cordon(name);
                effects.push(Effect::Changed);
                for (pod, to) in moved {
                    effects.extend(self.delete(now, &pod));
                    effects.extend(self.start(now, &to)?.effects);
                }
            }
            Event::Change(Change::Spread) => {
                let moved = self.moved(&Change::Spread)?;
                let rest = moved.into_iter().map(|(pod, to)| (pod, Some(to))).collect();
                effects.extend(self.replace(now, rest)?);
            }
            Event::Change(change @ (Change::Scale(_) | Change::PodDeleted(_))) => {
                let before = self.objects.pods();
                let mut wanted = self.objects.clone();
                wanted.make(change)?;
                let after = wanted.pods();
                for pod in before.keys().filter(|pod| !after.contains_key(*pod)) {
                    effects.extend(self.delete(now, pod));
                }
                for node in after.iter().filter(|(pod, _)| !before.contains_key(*pod)).map(|(_, node)| node) {
                    effects.extend(self.start(now, node)?.effects);
                }
            }
            Event::Change(change) => {
                self.objects.make(change)?;
                effects.push(Effect::Changed);
            }
            Event::Rollout => {
                let pods = self.objects.pods();
                effects.extend(self.replace(now, pods.into_keys().map(|pod| (pod, None)).collect())?);
            }
            Event::Crash(name) => {
                let node = self.machines.node_named(name)?;
                effects.push(Effect::Crashed(node));
                effects.push(later(now + self.learn.agent_restart, Step::AgentBack(node)));
            }
            Event::Outage(time) => {
                self.away_until = self.away_until.max(now + *time);
                effects.push(later(self.away_until, Step::ApiBack));
            }
            Event::Pod(pod, step) => effects.extend(self.pod(pod, step)?),
        }
        Ok(effects)
    }

    /// Executes a measured step in the life of a pod.
    fn pod(&mut self, pod: &str, step: &PodEvent) -> Outcome {
        match step {
            PodEvent::Ready(node) => {
                self.objects.put_pod(pod, node, true)?;
                let pod = self.machines.add_pod(pod, Some(node), true);
                self.machines.serve(pod);
            }
            PodEvent::Terminating => {
                self.known(pod)?;
                self.objects.set_pod(pod, PodState::Terminating);
            }
            PodEvent::Removed => {
                self.known(pod)?;
                self.objects.remove_pod(pod);
            }
            PodEvent::Stopped => {
                let pod = self.known(pod)?;
                return Ok(self.stop(pod));
            }
        }
        Ok(vec![Effect::Changed])
    }

    fn known(&self, pod: &str) -> Result<usize, ChangeError> {
        let names = || self.machines.pods().iter().map(|pod| pod.name.as_str());
        self.machines.pod_named(pod).ok_or_else(|| ChangeError::NoPod {
            pod: pod.to_owned(),
            service: self.service.clone(),
            known: names().collect::<Vec<_>>().join(", "),
        })
    }

    /// Returns the pods that a change would move, each with its new node.
    fn moved(&self, change: &Change) -> Result<BTreeMap<String, String>, ChangeError> {
        let before = self.objects.pods();
        let mut wanted = self.objects.clone();
        wanted.make(change)?;
        let after = wanted.pods();
        Ok(after.into_iter().filter(|(pod, node)| before.get(pod).is_some_and(|was| was != node)).collect())
    }

    /// Removes a node without notice.
    fn vanish(&mut self, now: Duration, name: &str) -> Outcome {
        let node = self.machines.node_named(name)?;
        if !self.machines.vanish(node) {
            return Ok(Vec::new());
        }
        let mut effects = vec![
            Effect::Cut(Why::NodeGone, Through::Node(node)),
            Effect::Cut(Why::PodGone, Through::Pods(self.machines.pods_on(node))),
        ];
        effects.extend(self.fall_silent(now, node));
        let since = self.machines.nodes()[node].silent_since.unwrap_or(now);
        effects.push(later(now + self.balancer.vanished.value, Step::Withdrawn(node, since)));
        Ok(effects)
    }

    /// Cuts a node off from the others and from the API, but not from the balancer.
    fn isolate(&mut self, now: Duration, name: &str) -> Outcome {
        let node = self.machines.node_named(name)?;
        if !self.machines.is_there(node) || !self.machines.isolate(node) {
            return Ok(Vec::new());
        }
        let pods = self.machines.pods_on(node);
        let mut effects = vec![Effect::Cut(Why::PodGone, Through::Forwarded { node, pods })];
        effects.extend(self.fall_silent(now, node));
        Ok(effects)
    }

    /// Begins the silence of a node, unless it was cut off before it is gone.
    fn fall_silent(&mut self, now: Duration, node: usize) -> Vec<Effect> {
        let mut effects = vec![Effect::Silent(node)];
        let machine = &self.machines.nodes()[node];
        let has_object = self.objects.nodes().any(|object| object.name == machine.name);
        if machine.silent_since.is_none() {
            self.machines.fall_silent(node, now);
            if has_object {
                effects.push(later(now + self.learn.node_grace, Step::TakenForLost(node, now)));
            }
        }
        effects
    }

    fn is_silent_since(&self, node: usize, since: Duration) -> bool {
        self.machines.nodes()[node].silent_since == Some(since)
    }

    /// Returns a node with its pods as they were, and its objects if they are gone meanwhile.
    fn come_back(&mut self, name: &str) -> Outcome {
        let node = self.machines.node_named(name)?;
        let mut effects = Vec::new();
        if let Some(removed) = self.lost.remove(name) {
            self.objects.put_back(removed);
            effects.push(Effect::Changed);
        }
        if self.leaving.remove(&node) {
            effects.push(Effect::Changed);
        }
        if self.machines.come_back(node) {
            effects.push(Effect::Back(node));
        }
        Ok(effects)
    }

    /// Gives the agent of a node notice that the node will go: it tells its balancers at once, and
    /// the other agents by the API. kube-proxy does not ask for notice.
    fn give_notice(&mut self, name: &str) -> Outcome {
        let node = self.machines.node_named(name)?;
        if self.proxy.is_kube_proxy() {
            return Ok(Vec::new());
        }
        self.machines.give_notice(node);
        self.leaving.insert(node);
        Ok(vec![Effect::Changed])
    }

    fn stop(&mut self, pod: usize) -> Vec<Effect> {
        if !self.machines.stop(pod) {
            return Vec::new();
        }
        let name = self.machines.pods()[pod].name.clone();
        vec![
            Effect::Note(What::PodStopped(name), None),
            Effect::Cut(Why::PodGone, Through::Pods([pod].into())),
        ]
    }

    /// Deletes a pod: its endpoint follows after a delay, and it stops `pod_stop` after its
    /// deletion.
    fn delete(&self, now: Duration, pod: &str) -> Vec<Effect> {
        let Some(number) = self.machines.pod_named(pod) else { return Vec::new() };
        let stops = now + self.learn.pod_stop;
        vec![
            later(stops, Step::Stopped(number)),
            later(now + self.learn.endpoints, Step::PodTerminates(pod.to_owned())),
            later(stops + self.learn.endpoints, Step::PodRemoved(pod.to_owned())),
        ]
    }

    /// Creates a new pod that becomes ready later.
    fn start(&mut self, now: Duration, node: &str) -> Result<Started, ChangeError> {
        let name = self.machines.new_pod_name();
        self.objects.put_pod(&name, node, false)?;
        let pod = self.machines.add_pod(&name, Some(node), false);
        let serves = now + self.learn.pod_start;
        let effects = vec![
            Effect::Changed,
            Effect::Note(What::PodStarts(name.clone()), Some(node.to_owned())),
            later(serves, Step::Serves(pod)),
            later(serves + self.learn.endpoints, Step::PodReady(name)),
        ];
        Ok(Started { serves, effects })
    }

    /// Replaces the first of some pods; the others follow once its successor is ready.
    fn replace(&mut self, now: Duration, mut rest: VecDeque<(String, Option<String>)>) -> Outcome {
        let Some((old, to)) = rest.pop_front() else { return Ok(Vec::new()) };
        let node = match to {
            Some(node) => node,
            None => self.objects.emptiest_with_pending()?,
        };
        let Started { serves, mut effects } = self.start(now, &node)?;
        effects.push(later(serves, Step::Delete(old)));
        effects.push(later(serves, Step::Replace(rest)));
        Ok(effects)
    }
}

/// A pod that was created.
struct Started {
    /// The time from which it accepts connections.
    serves: Duration,
    effects: Vec<Effect>,
}

fn later(at: Duration, step: Step) -> Effect {
    Effect::Later(at, Next::Step(step))
}
