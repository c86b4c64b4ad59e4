//! The time line: events, and the reactions of nodes and of the balancer.

use std::time::Duration;

use super::event::Event;
use crate::verdict::Question;

/// An occurrence at one moment that concerns no node, one, or several.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Moment {
    pub at: Duration,
    pub what: What,
    pub nodes: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum What {
    Event(Event),
    /// The agents have written a change of policy or drain.
    Written,
    /// A node without an endpoint keeps forwarding for this time.
    Drains(Duration),
    DrainOver,
    AgentBack,
    ApiBack,
    /// Kubernetes considers the node lost, and its pods with it.
    TakenForLost,
    PodStarts(String),
    PodReady(String),
    PodStopped(String),
    /// The balancer makes this check from now on.
    Asks(Question),
    /// The balancer considers the node unhealthy and sends it no more requests.
    Unhealthy,
    Healthy,
    /// An agent takes this node for dead, and its endpoints get no new connection from there.
    LeftOut(String),
    /// An agent takes this node for dead, and may not leave out one more.
    NotLeftOut(String),
    /// This node answers an agent again.
    TakenBack(String),
    /// An agent hears no other node, and takes its own for cut off.
    CutOff,
    /// The node is not cut off any more.
    InTouch,
    /// No node is healthy, and all members get requests.
    FailsOpen,
    /// No node is healthy, and none gets requests.
    NobodyLeft,
}

#[derive(Debug, Default)]
pub(super) struct Line(pub(super) Vec<Moment>);

impl Line {
    /// Notes an occurrence. Equal ones at the same moment share an entry.
    pub(super) fn note(&mut self, at: Duration, what: What, node: Option<&str>) {
        let mut same = self.0.iter_mut().rev().take_while(|moment| moment.at == at);
        match same.find(|moment| moment.what == what) {
            Some(moment) => moment.nodes.extend(node.map(str::to_owned)),
            None => self.0.push(Moment { at, what, nodes: node.map(str::to_owned).into_iter().collect() }),
        }
    }
}
