//! Which nodes a load balancer believes in, what becomes of a request there, and which pod gets how much: judged from objects that
//! anybody may list. Pure: no input or output. What decides about endpoints is the [`traffic_policy_cluster::model`]'s own code, so that this and an
//! agent cannot disagree.

#![forbid(unsafe_code)]

mod balancer;
mod change;
mod cluster;
pub mod command;
mod finding;
mod fix;
mod guess;
mod health_port;
mod judge;
mod nodes;
mod overrides;
pub mod page;
pub mod probe;
mod profiles;
mod rules;
mod simulate;
#[cfg(test)]
mod tests;
mod verdict;
pub mod watch;
mod what_if;

pub use balancer::{Ask, Balancer, Check, Fact, Weights};
pub use change::{ALLOCATED, Change, ChangeError, NodeChange};
pub use cluster::Cluster;
pub use finding::{Finding, Level};
pub use guess::{Guess, guess};
pub use judge::Judge;
pub use nodes::Who;
pub use overrides::{Overrides, Span};
pub use profiles::{CUSTOM, PROFILES, by_name};
pub use simulate::{
    Counts, Event, Learn, Load, Measured, Moment, PodEvent, Second, SimulateError, Simulated, Simulation,
    Timed, What, Why,
};
pub use verdict::{Answer, Fate, Judgement, Membership, PodShare, PortJudgement, Question, Row};
pub use what_if::{Cost, Loss, WhatIf};
