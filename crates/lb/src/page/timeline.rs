//! The outcome of requests, second by second: a simulation's result, for [`super::Page`].

use serde::{Deserialize, Serialize};

/// A time line, drawn if a page has one: `page.with(Part::Timeline, &timeline)`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Timeline {
    /// Scenario, balancer and rate of the simulation, in a few words.
    pub title: String,
    /// The seconds, one entry each, from the start on.
    pub seconds: Vec<Second>,
    /// The events with their times.
    pub events: Vec<Event>,
}

/// The requests of one second; each is counted once, in the second in which it was sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Second {
    /// The number of answered requests.
    pub ok: u64,
    /// The number of requests that were answered a second late, to their client's second SYN.
    pub delayed: u64,
    /// The number of requests that were dropped, refused, or sent to a node that is gone.
    pub lost: u64,
    /// The number of requests whose connection ended early.
    pub cut: u64,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Event {
    /// The time in seconds since the start.
    pub second: f64,
    /// The event in a few words.
    pub what: String,
}
