//! Judgements of load balancing: which nodes a load balancer considers healthy, the outcome of
//! requests there, and the share of each pod, computed from objects that any user may list. Pure:
//! no input or output. The decisions about endpoints are made by the code of
//! [`traffic_policy_cluster::model`] itself, so that this crate and an agent cannot disagree.

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
mod proxy;
mod rules;
mod simulate;
#[cfg(test)]
mod tests;
mod verdict;
pub mod watch;
mod what_if;

pub use balancer::{Ask, Balancer, Check, Fact, Weights};
pub use change::{ALLOCATED, Change, ChangeError, NodeChange};
pub use cluster::{Agents, Cluster};
pub use finding::{Finding, Level};
pub use guess::{Guess, guess};
pub use judge::Judge;
pub use nodes::Who;
pub use overrides::{Overrides, Span};
pub use profiles::{CUSTOM, PROFILES, by_name};
pub use proxy::{Proxy, Silence};
pub use simulate::{
    Counts, Event, Learn, Load, Measured, Moment, PodEvent, Second, SimulateError, Simulated, Simulation,
    Timed, What, Why,
};
pub use verdict::{Answer, Fate, Judgement, Membership, PodShare, PortJudgement, Question, Row};
pub use what_if::{Cost, Loss, WhatIf};
