//! The agents of the nodes, and the state that they have written: the outcome of a request at a
//! node, and its answer to a health check.

use std::time::Duration;

use traffic_policy_cluster::model::{HeldPolicy, drain_until};

use super::{
    effect::Effect,
    line::What,
    machines::{Machine, Machines, Reached},
    queue::Next,
    silence::{Facts, Silences},
    tally::Why,
    version::Version,
};
use crate::{
    judge::OnNode,
    proxy,
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
#[derive(Debug)]
pub(super) struct Agents {
    versions: Vec<Version>,
    /// The agents by the numbers of their nodes; those of the last nodes may be missing, and then
    /// have written nothing.
    agents: Vec<Agent>,
    silences: Silences,
}

/// A request that reaches no pod: the reason, and the pod that it was sent to.
#[derive(Clone, Copy, Debug)]
pub(super) struct Missed {
    pub(super) why: Why,
    pub(super) pod: Option<usize>,
    /// Whether the pod's machine answers nothing.
    pub(super) is_silent: bool,
}

impl Missed {
    pub(super) const fn new(why: Why) -> Self {
        Self { why, pod: None, is_silent: false }
    }
}

/// The fate of a connection's first segment, and the suspicion that it raises.
#[derive(Debug)]
pub(super) struct Delivered {
    pub(super) outcome: Result<usize, Missed>,
    pub(super) suspicion: Option<Effect>,
}

/// Returns the nanoseconds of the clock for drains. It does not begin at 0, which stands for no
/// drain.
fn clock(now: Duration) -> u64 {
    u64::try_from(now.as_nanos()).unwrap_or(u64::MAX).saturating_add(1)
}

impl Agents {
    /// Returns agents that know no version and no silent node. A finding about another node is in
    /// effect after this reaction time.
    pub(super) fn new(silence: proxy::Silence, reaction: Duration) -> Self {
        Self { versions: Vec::new(), agents: Vec::new(), silences: Silences::new(silence, reaction) }
    }

    /// Adds a version of the objects, and returns its number.
    pub(super) fn add_version(&mut self, version: Version) -> usize {
        self.versions.push(version);
        self.versions.len() - 1
    }

    pub(super) fn version(&self, number: usize) -> &Version {
        &self.versions[number]
    }

    pub(super) fn newest(&self) -> &Version {
        &self.versions[self.versions.len() - 1]
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
        machines: &Machines,
        version: usize,
    ) -> Vec<Effect> {
        let mut effects = Vec::new();
        let machine = &machines.nodes()[node];
        let Agent { is_down, written, held } = self.agent(node);
        if !machine.is_connected() || is_down || written.is_some_and(|written| written >= version) {
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
        effects.extend(self.about_silence(node, machines, Silences::written));
        effects
    }

    /// Lets the agent of a node that was gone, or cut off, write the newest version.
    pub(super) fn back(&mut self, now: Duration, node: usize, machines: &Machines) -> Vec<Effect> {
        self.written(now, node, machines, self.versions.len() - 1)
    }

    /// Executes the next step of a node about another one that is silent.
    pub(super) fn silence(
        &mut self,
        now: Duration,
        front: usize,
        node: usize,
        machines: &Machines,
    ) -> Vec<Effect> {
        self.about_silence(front, machines, |silences, facts| silences.step(now, node, facts))
    }

    fn about_silence(
        &mut self,
        front: usize,
        machines: &Machines,
        step: impl FnOnce(&mut Silences, Facts<'_>) -> Vec<Effect>,
    ) -> Vec<Effect> {
        let Agent { is_down, written, .. } = self.agent(front);
        let Some(version) = written.and_then(|written| self.versions.get(written)) else {
            return Vec::new();
        };
        step(&mut self.silences, Facts { front, machines, hosts: &version.hosts, is_agent_down: is_down })
    }

    /// Forgets what a node that is gone knew about others.
    pub(super) fn gone(&mut self, node: usize) {
        self.silences.forget(node);
    }

    /// Whether a node still tries to reach another one that is silent.
    pub(super) fn tries(&self, front: usize, node: usize, machines: &Machines) -> bool {
        machines.is_there(front)
            && !machines.are_joined(front, node)
            && !self.silences.is_dead(front, node)
            && self.has_endpoints(front, node)
    }

    /// Whether a node has endpoints in the version that another one has written.
    fn has_endpoints(&self, front: usize, node: usize) -> bool {
        let written = self.agent(front).written.and_then(|written| self.versions.get(written));
        written.is_some_and(|version| version.hosts.contains(&node))
    }

    /// Counts a SYN that a node sends to a silent one.
    pub(super) fn unanswered(&mut self, now: Duration, front: usize, node: usize) -> Option<Effect> {
        self.silences.syn(now, front, node, false)
    }

    /// Whether the Service port is one of TCP: other clients do not send a first segment again, and
    /// the packet path counts SYNs only.
    pub(super) fn is_tcp(&self) -> bool {
        self.versions.first().is_some_and(|version| version.standpoint.is_tcp)
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
    pub(super) fn restart(&mut self, now: Duration, node: usize, machines: &Machines) -> Vec<Effect> {
        let machine = &machines.nodes()[node];
        if !machine.is_there || !std::mem::take(&mut self.agent_mut(node).is_down) {
            return Vec::new();
        }
        let mut effects = vec![Effect::Note(What::AgentBack, Some(machine.name.clone()))];
        effects.extend(self.back(now, node, machines));
        effects.extend(self.silences.agent_back(now, node));
        effects
    }

    /// Returns the version that a node has written, and the node's state in it.
    fn view(&self, node: usize, machine: &Machine) -> Option<(&Version, &OnNode)> {
        let version = &self.versions[self.agent(node).written?];
        Some((version, version.standpoint.nodes.get(&machine.name)?))
    }

    /// Whether connections outlive nodes, by what a node has written.
    pub(super) fn outlives_nodes(&self, node: usize, machines: &Machines) -> bool {
        self.view(node, &machines.nodes()[node]).is_some_and(|(version, _)| version.standpoint.outlives_nodes)
    }

    /// Delivers a new connection to a node.
    pub(super) fn deliver(
        &mut self,
        now: Duration,
        node: usize,
        machines: &Machines,
        random: &mut fastrand::Rng,
    ) -> Delivered {
        match self.choose(now, node, machines, random, false) {
            Ok(pod) => self.reach(now, node, pod, machines),
            Err(missed) => Delivered { outcome: Err(missed), suspicion: None },
        }
    }

    /// Delivers a first segment that is sent again, because a pod did not answer. If the pod's node
    /// is suspected, it goes to another one.
    pub(super) fn deliver_again(
        &mut self,
        now: Duration,
        (node, pod): (usize, usize),
        machines: &Machines,
        random: &mut fastrand::Rng,
    ) -> Delivered {
        let host = machines.pods()[pod].node;
        let chosen = if !machines.is_there(node) {
            Err(Missed::new(Why::NodeGone))
        } else if host.is_some_and(|host| self.silences.is_suspected(node, host)) {
            self.choose(now, node, machines, random, true)
        } else {
            Ok(pod)
        };
        match chosen {
            Ok(pod) => self.reach(now, node, pod, machines),
            Err(missed) => Delivered { outcome: Err(missed), suspicion: None },
        }
    }

    /// Returns the pod that a node chooses for a new connection, or for one whose pod did not
    /// answer.
    fn choose(
        &self,
        now: Duration,
        node: usize,
        machines: &Machines,
        random: &mut fastrand::Rng,
        again: bool,
    ) -> Result<usize, Missed> {
        let machine = &machines.nodes()[node];
        if !machine.is_there {
            return Err(Missed::new(Why::NodeGone));
        }
        let drains = self.agent(node).held.is_some_and(|held| clock(now) < held.drain_until);
        let drawn = random.usize(..);
        let (version, on_node) = self.view(node, machine).ok_or(Missed::new(Why::Refused))?;
        let list = match on_node.fate {
            Fate::Served { .. } => version.standpoint.list(on_node),
            Fate::Dropped if drains => version.standpoint.draining(on_node),
            Fate::Dropped => return Err(Missed::new(Why::Dropped)),
            Fate::Refused => return Err(Missed::new(Why::Refused)),
        };
        let list = list.ok_or(Missed::new(Why::Refused))?;
        let count = list.endpoints.len();
        let left_out = self.silences.left_out(node);
        let pod_at =
            |at: usize| list.endpoints.get(at).and_then(|address| version.pods.get(&address.ip())).copied();
        let pod = if left_out.is_empty() && version.leaving.is_empty() && !again {
            list.drawn(drawn, &(0..count)).and_then(pod_at)
        } else {
            let host = |at: usize| pod_at(at).and_then(|pod| machines.pods()[pod].node);
            let speaks = |at: &usize| {
                host(*at).is_none_or(|host| match again {
                    true => !self.silences.is_suspected(node, host),
                    false => !left_out.contains(&host),
                })
            };
            let stays =
                |at: &usize| host(*at).is_none_or(|host| host == node || !version.leaving.contains(&host));
            // Endpoints are left out while there are others. Those of a node that leaves still
            // answer, and so come before those of a silent one.
            let mut candidates: Vec<usize> = (0..count).filter(|at| speaks(at) && stays(at)).collect();
            if candidates.is_empty() {
                candidates = (0..count).filter(speaks).collect();
            }
            if candidates.is_empty() {
                candidates = (0..count).collect();
            }
            list.drawn(drawn, &candidates.iter().copied()).and_then(pod_at)
        };
        pod.ok_or(Missed::new(Why::Refused))
    }

    /// Sends the first segment of a connection to a pod.
    fn reach(&mut self, now: Duration, node: usize, pod: usize, machines: &Machines) -> Delivered {
        let answer = machines.answer(node, pod);
        let is_silent = answer == Reached::Silence;
        let suspicion = match machines.pods()[pod].node {
            Some(host) if host != node && self.is_tcp() && self.has_endpoints(node, host) => {
                self.silences.syn(now, node, host, !is_silent)
            }
            _ => None,
        };
        let outcome = match answer {
            Reached::Serves => Ok(pod),
            Reached::Refuses | Reached::Silence => {
                Err(Missed { why: Why::PodGone, pod: Some(pod), is_silent })
            }
        };
        Delivered { outcome, suspicion }
    }

    /// Returns the answer of a node to a health check, and the suspicion that it raises. A dead
    /// agent does not answer, but what it has written stays in effect.
    pub(super) fn answer(
        &mut self,
        now: Duration,
        node: usize,
        machines: &Machines,
        question: Question,
        random: &mut fastrand::Rng,
    ) -> (Answer, Option<Effect>) {
        let machine = &machines.nodes()[node];
        if !machine.is_there {
            return (Answer::Silence, None);
        }
        if let Question::TrafficPort(_) = question {
            let Delivered { outcome, suspicion } = self.deliver(now, node, machines, random);
            let answer = match outcome {
                Ok(_) => Answer::Open,
                // A pod that has stopped refuses, unless its node is silent, too.
                Err(Missed { why: Why::Refused | Why::PodGone, is_silent: false, .. }) => Answer::Refused,
                Err(_) => Answer::Silence,
            };
            return (answer, suspicion);
        }
        let Some((_, on_node)) = self.view(node, machine) else { return (Answer::Refused, None) };
        // The agent of a node that hears nobody, or that will go, does not want new connections.
        let declines = self.silences.is_cut_off(node) || machine.has_notice;
        let answer = match question {
            Question::Nothing if on_node.announced => Answer::Announced,
            Question::Nothing => Answer::NotAnnounced,
            _ if self.agent(node).is_down => Answer::Refused,
            Question::ProxyHealth if declines => Answer::Unavailable,
            Question::ProxyHealth => on_node.proxy,
            // Under policy Cluster there is no such port.
            _ if declines => on_node.health.map_or(Answer::Refused, |_| Answer::Unavailable),
            _ => on_node.health.unwrap_or(Answer::Refused),
        };
        (answer, None)
    }
}
