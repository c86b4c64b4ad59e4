//! Effects: the consequences that one part of a simulation returns for the others.

use std::{collections::BTreeSet, time::Duration};

use super::{line::What, queue::Next, tally::Why};

/// A consequence of a step.
#[derive(Debug)]
pub(super) enum Effect {
    /// An entry of the time line, and the node that it concerns.
    Note(What, Option<String>),
    /// A step at a later time.
    Later(Duration, Next),
    /// The end of requests in flight, and its reason.
    Cut(Why, Through),
    /// The objects have changed, and are to be published.
    Changed,
    /// The agent of a node has crashed.
    Crashed(usize),
    /// The agent of a node is started again.
    Restarted(usize),
    /// The announcements of a node have timed out.
    Withdrawn(usize),
    /// The balancer moves the address away from a node: its connections come by other nodes.
    Moved(usize),
    /// The router spreads connections over another set of nodes than before.
    Rehashed,
    /// The other nodes do not reach this one any more.
    Silent(usize),
    /// A node that was gone, or cut off, is there again.
    Back(usize),
}

/// A part of the way of requests.
#[derive(Debug)]
pub(super) enum Through {
    Node(usize),
    Pods(BTreeSet<usize>),
    /// The segments that a node forwards to pods elsewhere, and those that other nodes forward to
    /// its pods.
    Forwarded {
        node: usize,
        pods: BTreeSet<usize>,
    },
}
