//! Nodes, and the state that their agents have written: the outcome of a request there, and the
//! answer to a health check.

use std::{collections::HashMap, net::IpAddr, time::Duration};

use traffic_policy_cluster::model::{HeldPolicy, drain_until};

use super::{line::What, queue::Next, run::Run, tally::Why};
use crate::{
    judge::{OnNode, Standpoint},
    verdict::{Answer, Fate, Question},
};

/// The consequences of one version of the objects, and the pods by their addresses in it.
#[derive(Debug)]
pub(super) struct Version {
    pub(super) standpoint: Standpoint,
    pub(super) pods: HashMap<IpAddr, usize>,
}

/// A machine with its agent.
#[derive(Debug)]
pub(super) struct Node {
    pub(super) name: String,
    pub(super) is_there: bool,
    /// Whether the agent runs and has synchronised with the API.
    pub(super) agent: bool,
    /// The version of the objects that the agent has written.
    pub(super) written: Option<usize>,
    held: Option<HeldPolicy>,
}

#[derive(Debug)]
pub(super) struct Pod {
    pub(super) name: String,
    pub(super) node: Option<usize>,
    pub(super) serves: bool,
}

impl Node {
    pub(super) fn new(name: &str) -> Self {
        Self { name: name.to_owned(), is_there: true, agent: true, written: None, held: None }
    }
}

/// A request that reaches no pod: the reason, and the pod that it was sent to.
pub(super) struct Missed {
    pub(super) why: Why,
    pub(super) pod: Option<usize>,
}

/// Returns the nanoseconds of the clock for drains. It does not begin at 0, which stands for no
/// drain.
fn clock(now: Duration) -> u64 {
    u64::try_from(now.as_nanos()).unwrap_or(u64::MAX).saturating_add(1)
}

impl Run<'_> {
    /// Sets the node to a state that has lasted for long.
    pub(super) fn settle(&mut self, node: usize) {
        let Some(version) = self.versions.first() else { return };
        let on_node = version.standpoint.nodes.get(&self.nodes[node].name);
        let silent = on_node.is_some_and(|on_node| on_node.silent);
        let local = version.standpoint.is_local(on_node.map_or(0, |on_node| on_node.local_endpoints));
        let node = &mut self.nodes[node];
        node.is_there = !silent;
        node.written = Some(0);
        node.held = Some(HeldPolicy { local, drain_until: 0 });
    }

    /// Lets an agent write a version, unless it knows a newer one or does not run.
    pub(super) fn written(&mut self, now: Duration, node: usize, version: usize) {
        let Node { is_there, agent, written, held, .. } = self.nodes[node];
        if !is_there || !agent || written.is_some_and(|written| written >= version) {
            return;
        }
        let standpoint = &self.versions[version].standpoint;
        let name = &self.nodes[node].name;
        // The machine of a deleted Node still runs, but the objects no longer contain its
        // endpoints.
        let local_endpoints = standpoint.nodes.get(name).map_or(0, |on_node| on_node.local_endpoints);
        let local = standpoint.is_local(local_endpoints);
        let until = drain_until(local, local_endpoints, held, standpoint.drain, clock(now));
        let news = written.is_some_and(|written| {
            let before = &self.versions[written].standpoint;
            (before.policy, before.drain) != (standpoint.policy, standpoint.drain)
        });
        let began = until > clock(now) && held.is_none_or(|held| held.drain_until != until);
        let drain = standpoint.drain;
        if news {
            self.line.note(now, What::Written, Some(name));
        }
        if began {
            self.line.note(now, What::Drains(drain), Some(name));
            self.queue.push(now + drain, Next::Drained { node });
        }
        let node = &mut self.nodes[node];
        node.written = Some(version);
        node.held = Some(HeldPolicy { local, drain_until: until });
    }

    /// Handles the end of a drain, which may have ended before.
    pub(super) fn drained(&mut self, now: Duration, node: usize) {
        let Node { name, is_there, held, .. } = &self.nodes[node];
        if *is_there && held.is_some_and(|held| held.drain_until == clock(now)) {
            self.line.note(now, What::DrainOver, Some(name));
        }
    }

    /// Returns the version that a node has written, and the node's state in it.
    fn view(&self, node: usize) -> Option<(&Version, &OnNode)> {
        let node = &self.nodes[node];
        let version = &self.versions[node.written?];
        Some((version, version.standpoint.nodes.get(&node.name)?))
    }

    /// Returns the pod that takes a new connection to a node.
    pub(super) fn deliver(&mut self, now: Duration, node: usize) -> Result<usize, Missed> {
        let missed = |why| Missed { why, pod: None };
        if !self.nodes[node].is_there {
            return Err(missed(Why::NodeGone));
        }
        let drains = self.nodes[node].held.is_some_and(|held| clock(now) < held.drain_until);
        let drawn = self.random.usize(..);
        let (version, on_node) = self.view(node).ok_or_else(|| missed(Why::Refused))?;
        let list = match on_node.fate {
            Fate::Served { .. } => version.standpoint.list(on_node),
            Fate::Dropped if drains => version.standpoint.draining(on_node),
            Fate::Dropped => return Err(missed(Why::Dropped)),
            Fate::Refused => return Err(missed(Why::Refused)),
        };
        let address = drawn.checked_rem(list.len()).and_then(|at| list.get(at));
        let pod = address.and_then(|address| version.pods.get(&address.ip())).copied();
        let pod = pod.ok_or_else(|| missed(Why::Refused))?;
        let is_there = |node: usize| self.nodes[node].is_there;
        if self.pods[pod].serves && self.pods[pod].node.is_none_or(is_there) {
            Ok(pod)
        } else {
            Err(Missed { why: Why::PodGone, pod: Some(pod) })
        }
    }

    /// Returns the answer of a node to a health check. A dead agent does not answer, but what it
    /// has written stays in effect.
    pub(super) fn answer(&mut self, now: Duration, node: usize, question: Question) -> Answer {
        if !self.nodes[node].is_there {
            return Answer::Silence;
        }
        if let Question::TrafficPort(_) = question {
            return match self.deliver(now, node) {
                Ok(_) => Answer::Open,
                Err(Missed { why: Why::Refused, .. }) => Answer::Refused,
                // A pod that has stopped refuses, unless its node is gone, too.
                Err(Missed { why: Why::PodGone, pod: Some(pod) })
                    if self.pods[pod].node.is_none_or(|node| self.nodes[node].is_there) =>
                {
                    Answer::Refused
                }
                Err(_) => Answer::Silence,
            };
        }
        let Some((_, on_node)) = self.view(node) else { return Answer::Refused };
        match question {
            Question::Nothing if on_node.announced => Answer::Announced,
            Question::Nothing => Answer::NotAnnounced,
            _ if !self.nodes[node].agent => Answer::Refused,
            Question::ProxyHealth => on_node.proxy,
            // Under policy Cluster there is no such port.
            _ => on_node.health.unwrap_or(Answer::Refused),
        }
    }
}
