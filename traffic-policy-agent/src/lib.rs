//! The node agent of traffic-policy.
//!
//! Data flows one way: a [source](traffic_policy_cluster::source) of Kubernetes objects fills the
//! [model](traffic_policy_cluster::model), the model says what the maps should hold, and the
//! [data plane](traffic_policy_dataplane) writes the difference; the [`health`] servers speak only of what has been written.

#![forbid(unsafe_code)]

pub mod check;
pub mod command;
pub mod controller;
pub mod health;
pub mod in_effect;
pub mod metrics;
pub mod systemd;
