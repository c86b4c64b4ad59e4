//! The agents of the nodes, and the state that they have written: the outcome of a request at a
//! node, and its answer to a health check.

use std::time::Duration;

use traffic_policy_cluster::model::{HeldPolicy, drain_until};

use super::{
    effect::Effect,
    line::What,
    machines::{Machine, Machines},
    queue::Next,
    tally::Why,
    version::Version,
};
use crate::{
    judge::OnNode,
    verdict::{Answer, Fate, Question},
};

/// The agent of a node.
#[derive(Clone, Copy, Debug, Default)]
struct Agent {
    /// Whether it does not run.
    is_down: bool,
    /// The version of the objects that it has written.
    written: Option<usize>,
    held: Option<HeldPolicy>,
}

/// All agents, and the versions of the objects that they may have written.
#[derive(Debug, Default)]
pub(super) struct Agents {
    versions: Vec<Version>,
    /// The agents by the numbers of their nodes; those of the last nodes may be missing, and then
    /// have written nothing.
    agents: Vec<Agent>,
}

/// A request that reaches no pod: the reason, and the pod that it was sent to.
#[derive(Clone, Copy, Debug)]
pub(super) struct Missed {
    pub(super) why: Why,
    pub(super) pod: Option<usize>,
}

/// Returns the nanoseconds of the clock for drains. It does not begin at 0, which stands for no
/// drain.
fn clock(now: Duration) -> u64 {
    u64::try_from(now.as_nanos()).unwrap_or(u64::MAX).saturating_add(1)
}

impl Agents {
    /// Adds a version of the objects, and returns its number.
    pub(super) fn add_version(&mut self, version: Version) -> usize {
        self.versions.push(version);
        self.versions.len() - 1
    }

    pub(super) fn version(&self, number: usize) -> &Version {
        &self.versions[number]
    }

    fn agent(&self, node: usize) -> Agent {
        self.agents.get(node).copied().unwrap_or_default()
    }

    fn agent_mut(&mut self, node: usize) -> &mut Agent {
        if self.agents.len() <= node {
            self.agents.resize_with(node + 1, Agent::default);
        }
        &mut self.agents[node]
    }

    /// Sets a node to a state that has lasted for long: its agent has written the first version.
    pub(super) fn settle(&mut self, node: usize, machine: &Machine) {
        let Some(version) = self.versions.first() else { return };
        let on_node = version.standpoint.nodes.get(&machine.name);
        let local = version.standpoint.is_local(on_node.map_or(0, |on_node| on_node.local_endpoints));
        let agent = self.agent_mut(node);
        agent.written = Some(0);
        agent.held = Some(HeldPolicy { local, drain_until: 0 });
    }

    /// Lets an agent write a version, unless it knows a newer one or does not run.
    pub(super) fn written(
        &mut self,
        now: Duration,
        node: usize,
        machine: &Machine,
        version: usize,
    ) -> Vec<Effect> {
        let mut effects = Vec::new();
        let Agent { is_down, written, held } = self.agent(node);
        if !machine.is_there || is_down || written.is_some_and(|written| written >= version) {
            return effects;
        }
        let standpoint = &self.versions[version].standpoint;
        // The machine of a deleted Node still runs, but the objects no longer contain its
        // endpoints.
        let local_endpoints =
            standpoint.nodes.get(&machine.name).map_or(0, |on_node| on_node.local_endpoints);
        let local = standpoint.is_local(local_endpoints);
        let until = drain_until(local, local_endpoints, held, standpoint.drain, clock(now));
        let news = written.is_some_and(|written| {
            let before = &self.versions[written].standpoint;
            (before.policy, before.drain) != (standpoint.policy, standpoint.drain)
        });
        let began = until > clock(now) && held.is_none_or(|held| held.drain_until != until);
        let drain = standpoint.drain;
        if news {
            effects.push(Effect::Note(What::Written, Some(machine.name.clone())));
        }
        if began {
            effects.push(Effect::Note(What::Drains(drain), Some(machine.name.clone())));
            effects.push(Effect::Later(now + drain, Next::Drained { node }));
        }
        let agent = self.agent_mut(node);
        agent.written = Some(version);
        agent.held = Some(HeldPolicy { local, drain_until: until });
        effects
    }

    /// Handles the end of a drain, which may have ended before.
    pub(super) fn drained(&self, now: Duration, node: usize, machine: &Machine) -> Option<Effect> {
        let is_now = self.agent(node).held.is_some_and(|held| held.drain_until == clock(now));
        (machine.is_there && is_now).then(|| Effect::Note(What::DrainOver, Some(machine.name.clone())))
    }

    /// Stops an agent; what it has written stays in effect.
    pub(super) fn crash(&mut self, node: usize) {
        self.agent_mut(node).is_down = true;
    }

    /// Starts an agent that does not run: it writes the newest version.
    pub(super) fn restart(&mut self, now: Duration, node: usize, machine: &Machine) -> Vec<Effect> {
        if !machine.is_there || !std::mem::take(&mut self.agent_mut(node).is_down) {
            return Vec::new();
        }
        let mut effects = vec![Effect::Note(What::AgentBack, Some(machine.name.clone()))];
        effects.extend(self.written(now, node, machine, self.versions.len() - 1));
        effects
    }

    /// Returns the version that a node has written, and the node's state in it.
    fn view(&self, node: usize, machine: &Machine) -> Option<(&Version, &OnNode)> {
        let version = &self.versions[self.agent(node).written?];
        Some((version, version.standpoint.nodes.get(&machine.name)?))
    }

    /// Returns the pod that takes a new connection to a node.
    pub(super) fn deliver(
        &self,
        now: Duration,
        node: usize,
        machines: &Machines,
        random: &mut fastrand::Rng,
    ) -> Result<usize, Missed> {
        let missed = |why| Missed { why, pod: None };
        let machine = &machines.nodes()[node];
        if !machine.is_there {
            return Err(missed(Why::NodeGone));
        }
        let drains = self.agent(node).held.is_some_and(|held| clock(now) < held.drain_until);
        let drawn = random.usize(..);
        let (version, on_node) = self.view(node, machine).ok_or_else(|| missed(Why::Refused))?;
        let list = match on_node.fate {
            Fate::Served { .. } => version.standpoint.list(on_node),
            Fate::Dropped if drains => version.standpoint.draining(on_node),
            Fate::Dropped => return Err(missed(Why::Dropped)),
            Fate::Refused => return Err(missed(Why::Refused)),
        };
        let address = drawn.checked_rem(list.len()).and_then(|at| list.get(at));
        let pod = address.and_then(|address| version.pods.get(&address.ip())).copied();
        let pod = pod.ok_or_else(|| missed(Why::Refused))?;
        if machines.is_reached(pod) { Ok(pod) } else { Err(Missed { why: Why::PodGone, pod: Some(pod) }) }
    }

    /// Returns the answer of a node to a health check. A dead agent does not answer, but what it
    /// has written stays in effect.
    pub(super) fn answer(
        &self,
        now: Duration,
        node: usize,
        machines: &Machines,
        question: Question,
        random: &mut fastrand::Rng,
    ) -> Answer {
        let machine = &machines.nodes()[node];
        if !machine.is_there {
            return Answer::Silence;
        }
        if let Question::TrafficPort(_) = question {
            return match self.deliver(now, node, machines, random) {
                Ok(_) => Answer::Open,
                Err(Missed { why: Why::Refused, .. }) => Answer::Refused,
                // A pod that has stopped refuses, unless its node is gone, too.
                Err(Missed { why: Why::PodGone, pod: Some(pod) }) if machines.has_machine(pod) => {
                    Answer::Refused
                }
                Err(_) => Answer::Silence,
            };
        }
        let Some((_, on_node)) = self.view(node, machine) else { return Answer::Refused };
        match question {
            Question::Nothing if on_node.announced => Answer::Announced,
            Question::Nothing => Answer::NotAnnounced,
            _ if self.agent(node).is_down => Answer::Refused,
            Question::ProxyHealth => on_node.proxy,
            // Under policy Cluster there is no such port.
            _ => on_node.health.unwrap_or(Answer::Refused),
        }
    }
}
