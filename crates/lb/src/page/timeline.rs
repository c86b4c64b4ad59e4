//! The fate of requests, second by second: a simulation's result, for [`super::Page`].

use serde::{Deserialize, Serialize};

/// Drawn where a page is given one, left out where not: `page.with(Part::Timeline, &timeline)`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Timeline {
    /// Scenario, balancer and rate of the simulation, in a few words.
    pub title: String,
    /// One for each second from the start on.
    pub seconds: Vec<Second>,
    /// Events with their times.
    pub events: Vec<Event>,
}

/// Requests of one second; each is counted once, in the second in which it was sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Second {
    /// Answered.
    pub ok: u64,
    /// Dropped, refused, or sent to a node that is gone.
    pub lost: u64,
    /// Of connections that ended before their time.
    pub cut: u64,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Event {
    /// Since the start.
    pub second: f64,
    /// A few words.
    pub what: String,
}
