//! Events as steps: their effects on machines and pods, and on the objects that describe them.

use std::{
    collections::{BTreeMap, VecDeque},
    time::Duration,
};

use super::{
    event::{Event, PodEvent},
    line::What,
    queue::Next,
    run::Run,
    tally::Why,
};
use crate::change::{Change, ChangeError, NodeChange, PodState};

/// A step of an event.
#[derive(Debug)]
pub(super) enum Step {
    /// An event, by its number.
    Event(usize),
    /// A pod accepts no more connections.
    Stopped(usize),
    AgentBack(usize),
    /// The announcements of a node that is gone have timed out.
    Withdrawn(usize),
    ApiBack,
    /// Kubernetes has not heard from a node for too long.
    TakenForLost(String),
    /// A new pod accepts connections.
    Serves(usize),
    /// The endpoints of a pod are updated.
    PodReady(String),
    PodTerminates(String),
    PodRemoved(String),
    Delete(String),
    /// A rollout, with the pods still to be replaced, each with the node of its successor.
    Replace(VecDeque<(String, Option<String>)>),
}

impl Step {
    const fn needs_api(&self, events: &[super::Timed]) -> bool {
        match self {
            Self::Event(number) => events[*number].event.needs_api(),
            Self::Stopped(_) | Self::Withdrawn(_) | Self::Serves(_) | Self::ApiBack => false,
            // The other steps need it, also the return of an agent, which has to read the objects
            // first.
            _ => true,
        }
    }
}

impl Run<'_> {
    pub(super) fn step(&mut self, now: Duration, step: Step) -> Result<(), ChangeError> {
        if now < self.away_until && step.needs_api(&self.input.events) {
            self.queue.push(self.away_until, Next::Step(step));
            return Ok(());
        }
        match step {
            Step::Event(number) => return self.event(now, &self.input.events[number].event),
            Step::Stopped(pod) => self.stop(now, pod),
            Step::AgentBack(node) => {
                if self.nodes[node].is_there && !self.nodes[node].agent {
                    self.nodes[node].agent = true;
                    self.line.note(now, What::AgentBack, Some(&self.nodes[node].name));
                    self.written(now, node, self.versions.len() - 1);
                }
            }
            Step::Withdrawn(node) => self.withdraw(now, node),
            Step::ApiBack => self.line.note(now, What::ApiBack, None),
            Step::TakenForLost(name) => {
                self.line.note(now, What::TakenForLost, Some(&name));
                self.objects.make(&Change::Node(name, NodeChange::Gone))?;
                self.changed(now);
            }
            Step::Serves(pod) => self.pods[pod].serves = true,
            Step::PodReady(pod) => {
                self.line.note(now, What::PodReady(pod.clone()), None);
                self.objects.set_pod(&pod, PodState::Ready);
                self.changed(now);
            }
            Step::PodTerminates(pod) => {
                self.objects.set_pod(&pod, PodState::Terminating);
                self.changed(now);
            }
            Step::PodRemoved(pod) => {
                self.objects.remove_pod(&pod);
                self.changed(now);
            }
            Step::Delete(pod) => self.delete(now, &pod),
            Step::Replace(rest) => return self.replace(now, rest),
        }
        Ok(())
    }

    fn event(&mut self, now: Duration, event: &Event) -> Result<(), ChangeError> {
        if let Some(node) = event.node()
            && !matches!(event, Event::Change(Change::Node(_, NodeChange::Added)))
        {
            self.node_named(node)?;
        }
        self.line.note(now, What::Event(event.clone()), event.node());
        match event {
            Event::Change(Change::Node(name, NodeChange::Gone)) => self.vanish(now, name)?,
            Event::Change(Change::Node(name, NodeChange::Drained)) => {
                let moved = self.moved(&Change::Node(name.clone(), NodeChange::Drained))?;
                self.objects.cordon(name);
                self.changed(now);
                for (pod, to) in moved {
                    self.delete(now, &pod);
                    self.start(now, &to)?;
                }
            }
            Event::Change(Change::Spread) => {
                let moved = self.moved(&Change::Spread)?;
                let rest = moved.into_iter().map(|(pod, to)| (pod, Some(to))).collect();
                self.replace(now, rest)?;
            }
            Event::Change(change @ (Change::Scale(_) | Change::PodDeleted(_))) => {
                let before = self.objects.pods();
                let mut wanted = self.objects.clone();
                wanted.make(change)?;
                let after = wanted.pods();
                for pod in before.keys().filter(|pod| !after.contains_key(*pod)) {
                    self.delete(now, pod);
                }
                for node in after.iter().filter(|(pod, _)| !before.contains_key(*pod)).map(|(_, node)| node) {
                    self.start(now, node)?;
                }
            }
            Event::Change(change) => {
                self.objects.make(change)?;
                self.changed(now);
            }
            Event::Rollout => {
                let pods = self.objects.pods();
                self.replace(now, pods.into_keys().map(|pod| (pod, None)).collect())?;
            }
            Event::Crash(name) => {
                let node = self.node_named(name)?;
                self.nodes[node].agent = false;
                self.queue.push(now + self.input.learn.agent_restart, Next::Step(Step::AgentBack(node)));
            }
            Event::Outage(time) => {
                self.away_until = self.away_until.max(now + *time);
                self.queue.push(self.away_until, Next::Step(Step::ApiBack));
            }
            Event::Pod(pod, step) => self.pod(now, pod, step)?,
        }
        Ok(())
    }

    /// Executes a measured step in the life of a pod.
    fn pod(&mut self, now: Duration, pod: &str, step: &PodEvent) -> Result<(), ChangeError> {
        let known = || {
            self.pod_of.get(pod).copied().ok_or_else(|| ChangeError::NoPod {
                pod: pod.to_owned(),
                service: self.input.service.clone(),
                known: self.pods.iter().map(|pod| pod.name.as_str()).collect::<Vec<_>>().join(", "),
            })
        };
        match step {
            PodEvent::Ready(node) => {
                self.objects.put_pod(pod, node, true)?;
                let pod = self.add_pod(pod, Some(node), true);
                self.pods[pod].serves = true;
                self.changed(now);
            }
            PodEvent::Terminating => {
                known()?;
                self.objects.set_pod(pod, PodState::Terminating);
                self.changed(now);
            }
            PodEvent::Removed => {
                known()?;
                self.objects.remove_pod(pod);
                self.changed(now);
            }
            PodEvent::Stopped => {
                let pod = known()?;
                self.stop(now, pod);
            }
        }
        Ok(())
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
    fn vanish(&mut self, now: Duration, name: &str) -> Result<(), ChangeError> {
        let node = self.node_named(name)?;
        if !std::mem::take(&mut self.nodes[node].is_there) {
            return Ok(());
        }
        let lost: Vec<bool> = self.pods.iter().map(|pod| pod.node == Some(node)).collect();
        self.cut(Why::NodeGone, |way| way.node == Some(node));
        self.cut(Why::PodGone, |way| way.pod.is_some_and(|pod| lost[pod]));
        self.queue.push(now + self.input.balancer.vanished.value, Next::Step(Step::Withdrawn(node)));
        let is_known = self.objects.nodes().any(|node| node.name == name);
        if is_known {
            let lost = Step::TakenForLost(name.to_owned());
            self.queue.push(now + self.input.learn.node_grace, Next::Step(lost));
        }
        Ok(())
    }

    fn stop(&mut self, now: Duration, pod: usize) {
        if std::mem::take(&mut self.pods[pod].serves) {
            self.line.note(now, What::PodStopped(self.pods[pod].name.clone()), None);
            self.cut(Why::PodGone, |way| way.pod == Some(pod));
        }
    }

    /// Deletes a pod: its endpoint follows after a delay, and it stops `pod_stop` after its
    /// deletion.
    fn delete(&mut self, now: Duration, pod: &str) {
        let Some(number) = self.pod_of.get(pod).copied() else { return };
        let learn = &self.input.learn;
        let stops = now + learn.pod_stop;
        self.queue.push(stops, Next::Step(Step::Stopped(number)));
        self.queue.push(now + learn.endpoints, Next::Step(Step::PodTerminates(pod.to_owned())));
        self.queue.push(stops + learn.endpoints, Next::Step(Step::PodRemoved(pod.to_owned())));
    }

    /// Creates a new pod that becomes ready later. Returns the time of that, and its name.
    fn start(&mut self, now: Duration, node: &str) -> Result<Duration, ChangeError> {
        let number = self.pods.len() + 1;
        let mut name = format!("new-{number}");
        while self.pod_of.contains_key(&name) {
            name.push('\'');
        }
        self.objects.put_pod(&name, node, false)?;
        let pod = self.add_pod(&name, Some(node), false);
        self.changed(now);
        self.line.note(now, What::PodStarts(name.clone()), Some(node));
        let serves = now + self.input.learn.pod_start;
        self.queue.push(serves, Next::Step(Step::Serves(pod)));
        self.queue.push(serves + self.input.learn.endpoints, Next::Step(Step::PodReady(name)));
        Ok(serves)
    }

    /// Replaces the first of some pods; the others follow once its successor is ready.
    fn replace(
        &mut self,
        now: Duration,
        mut rest: VecDeque<(String, Option<String>)>,
    ) -> Result<(), ChangeError> {
        let Some((old, to)) = rest.pop_front() else { return Ok(()) };
        let node = match to {
            Some(node) => node,
            None => self.objects.emptiest_with_pending()?,
        };
        let ready = self.start(now, &node)?;
        self.queue.push(ready, Next::Step(Step::Delete(old)));
        self.queue.push(ready, Next::Step(Step::Replace(rest)));
        Ok(())
    }
}
