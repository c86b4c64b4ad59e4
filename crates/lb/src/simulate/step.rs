//! Future steps of events.

use std::{collections::VecDeque, time::Duration};

use super::event::Event;

/// A step of an event.
#[derive(Debug)]
pub(super) enum Step {
    Event(Event),
    /// A pod accepts no more connections.
    Stopped(usize),
    AgentBack(usize),
    /// The announcements of a node that is gone since this time have timed out.
    Withdrawn(usize, Duration),
    ApiBack,
    /// Kubernetes has not heard from a node since this time, which is too long.
    TakenForLost(usize, Duration),
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
    /// Whether the step needs the API server.
    pub(super) const fn needs_api(&self) -> bool {
        match self {
            Self::Event(event) => event.needs_api(),
            Self::Stopped(_) | Self::Withdrawn(..) | Self::Serves(_) | Self::ApiBack => false,
            // The other steps need it, also the return of an agent, which has to read the objects
            // first.
            _ => true,
        }
    }
}
