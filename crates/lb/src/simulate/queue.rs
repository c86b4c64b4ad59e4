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
}

impl Next {
    const fn rank(&self) -> u8 {
        match self {
            Self::Step(_) => 0,
            Self::Publish => 1,
            Self::Written { .. } => 2,
            Self::HandedOn { .. } => 3,
            Self::Drained { .. } => 4,
            Self::Check { .. } => 5,
            Self::TimedOut { .. } => 6,
            Self::Done { .. } => 7,
            Self::Request { .. } => 8,
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
