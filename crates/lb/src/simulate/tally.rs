//! Counts of requests by outcome: for each second, node and pod.

use std::{collections::BTreeMap, ops::Add, time::Duration};

use serde::Serialize;

/// Numbers of requests; each request is counted in one of these.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Counts {
    /// The number of answered requests.
    pub ok: u64,
    /// The number of requests that were answered because their client sent the first segment again,
    /// a second later.
    pub delayed: u64,
    /// The number of requests that never reached a pod.
    pub lost: u64,
    /// The number of requests that reached a pod but lost it before the whole answer had arrived.
    pub cut: u64,
}

impl Counts {
    #[must_use]
    pub const fn all(self) -> u64 {
        self.ok + self.delayed + self.lost + self.cut
    }

    /// Returns the number of requests whose first segment had no answer.
    #[must_use]
    pub const fn missed(self) -> u64 {
        self.delayed + self.lost
    }

    pub(super) const fn increment(&mut self, fate: Became) {
        match fate {
            Became::Ok => self.ok += 1,
            Became::Delayed => self.delayed += 1,
            Became::Lost => self.lost += 1,
            Became::Cut => self.cut += 1,
        }
    }
}

impl Add for Counts {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            ok: self.ok + other.ok,
            delayed: self.delayed + other.delayed,
            lost: self.lost + other.lost,
            cut: self.cut + other.cut,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Became {
    Ok,
    Delayed,
    Lost,
    Cut,
}

/// The reason why a request was lost or cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Why {
    /// The balancer had no node to send it to.
    NoNode,
    /// The request was sent to a node that is gone.
    NodeGone,
    /// A node without a pod dropped it (policy Local).
    Dropped,
    /// There is no endpoint anywhere.
    Refused,
    /// The request was forwarded to a pod that is gone, or no longer listens.
    PodGone,
    /// The balancer cut the connections of a node that turned unhealthy.
    CutByBalancer,
    /// The router sent it to another node, which did not know the connection.
    Rehashed,
}

/// The requests that were sent within one second. Nodes and pods are given by their number in
/// [`super::Simulated`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Second {
    pub all: Counts,
    pub nodes: BTreeMap<usize, Counts>,
    pub pods: BTreeMap<usize, Counts>,
}

/// The path of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Way {
    pub(super) second: usize,
    /// The node that the balancer chose for it.
    pub(super) first: Option<usize>,
    /// The node that its segments come to.
    pub(super) node: Option<usize>,
    pub(super) pod: Option<usize>,
    /// Whether segments of it were sent again.
    pub(super) is_delayed: bool,
    /// Whether it goes on through another node if it has to.
    pub(super) outlives_node: bool,
    /// Whether it went on through another node.
    pub(super) is_moved: bool,
    /// Whether it would have been answered, if its node were not gone.
    pub(super) is_due: bool,
}

impl Way {
    /// Returns what becomes of the request if it is answered.
    pub(super) const fn answered(self) -> Became {
        if self.is_delayed { Became::Delayed } else { Became::Ok }
    }
}

#[derive(Debug, Default)]
pub(super) struct Tally {
    pub(super) seconds: Vec<Second>,
    pub(super) why: BTreeMap<Why, u64>,
    /// The number of answered requests that went on through another node.
    pub(super) outlived: u64,
}

impl Tally {
    pub(super) fn new(lasts: Duration) -> Self {
        let seconds = lasts.as_millis().div_ceil(1000);
        Self {
            seconds: vec![Second::default(); usize::try_from(seconds).unwrap_or(0)],
            why: BTreeMap::new(),
            outlived: 0,
        }
    }

    pub(super) fn count(&mut self, way: Way, became: Became, why: Option<Why>) {
        if let Some(why) = why {
            *self.why.entry(why).or_default() += 1;
        }
        if way.is_moved && matches!(became, Became::Ok | Became::Delayed) {
            self.outlived += 1;
        }
        let Some(second) = self.seconds.get_mut(way.second) else { return };
        second.all.increment(became);
        if let Some(node) = way.first {
            second.nodes.entry(node).or_default().increment(became);
        }
        if let Some(pod) = way.pod {
            second.pods.entry(pod).or_default().increment(became);
        }
    }
}
