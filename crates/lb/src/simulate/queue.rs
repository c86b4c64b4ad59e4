//! The queue of future steps, in the order of their times. At the same moment, steps that change
//! the cluster come first, then those by which parts learn of it, and requests last.

use std::{collections::BTreeMap, time::Duration};

use super::step::Step;

/// A future step. Steps of the same moment are executed in the order of the variants.
#[derive(Debug)]
pub(super) enum Next {
    Step(Step),
    /// The objects, as changed at this moment, are published.
    Publish,
    /// A node's agent has written a version.
    Written {
        node: usize,
        version: usize,
    },
    /// The balancer's controller has propagated a version.
    HandedOn {
        version: usize,
    },
    /// A drain has ended.
    Drained {
        node: usize,
    },
    /// A silent node is suspected by another one, judged, or asked again.
    Silence {
        front: usize,
        node: usize,
    },
    /// A SYN by which a node tries to reach a silent one, and that carries no request that could
    /// still be answered.
    Syn {
        front: usize,
        node: usize,
        /// Whether it is a new connection, which another one follows.
        is_new: bool,
    },
    Check {
        node: usize,
        generation: u32,
    },
    /// A check had no answer in time.
    TimedOut {
        node: usize,
        generation: u32,
    },
    /// A request has received its whole answer.
    Done {
        number: u64,
    },
    Request {
        number: u64,
    },
    /// The first SYN of a request had no answer, and is sent again.
    Resent {
        number: u64,
    },
}

impl Next {
    const fn rank(&self) -> u8 {
        match self {
            Self::Step(_) => 0,
            Self::Publish => 1,
            Self::Written { .. } => 2,
            Self::HandedOn { .. } => 3,
            Self::Drained { .. } => 4,
            Self::Silence { .. } => 5,
            Self::Syn { .. } => 6,
            Self::Check { .. } => 7,
            Self::TimedOut { .. } => 8,
            Self::Done { .. } => 9,
            Self::Request { .. } => 10,
            Self::Resent { .. } => 11,
        }
    }
}

#[derive(Debug, Default)]
pub(super) struct Queue {
    events: BTreeMap<(Duration, u8, u64), Next>,
    number: u64,
}

impl Queue {
    pub(super) fn push(&mut self, at: Duration, next: Next) {
        self.number += 1;
        self.events.insert((at, next.rank(), self.number), next);
    }

    pub(super) fn pop(&mut self) -> Option<(Duration, Next)> {
        self.events.pop_first().map(|((at, ..), next)| (at, next))
    }
}
