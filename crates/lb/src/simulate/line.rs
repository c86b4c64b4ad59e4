//! The time line: what happened, what nodes did, and what the balancer made of it.

use std::time::Duration;

use super::event::Event;
use crate::verdict::Question;

/// Something that happened at one moment, to no node, one, or several.
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
    /// A node without an endpoint goes on forwarding for so long.
    Drains(Duration),
    DrainOver,
    AgentBack,
    ApiBack,
    /// Kubernetes takes the node for lost, and its pods with it.
    TakenForLost,
    PodStarts(String),
    PodReady(String),
    PodStopped(String),
    /// The balancer asks this from now on.
    Asks(Question),
    /// The balancer sends no requests there any more.
    Dark,
    Green,
    /// No node is green, and all members are sent requests.
    FailsOpen,
    /// No node is green, and none is sent any.
    NobodyLeft,
}

#[derive(Debug, Default)]
pub(super) struct Line(pub(super) Vec<Moment>);

impl Line {
    /// The same at the same moment shares an entry.
    pub(super) fn note(&mut self, at: Duration, what: What, node: Option<&str>) {
        let mut same = self.0.iter_mut().rev().take_while(|moment| moment.at == at);
        match same.find(|moment| moment.what == what) {
            Some(moment) => moment.nodes.extend(node.map(str::to_owned)),
            None => self.0.push(Moment { at, what, nodes: node.map(str::to_owned).into_iter().collect() }),
        }
    }
}
