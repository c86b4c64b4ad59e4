//! The node agent of traffic-policy.
//!
//! Data flows one way: a [source](traffic_policy_cluster::source) of Kubernetes objects fills the
//! [model](traffic_policy_cluster::model), the model yields the desired content of the maps, and
//! the [data plane](traffic_policy_dataplane) writes the difference; the [`health`] servers reflect
//! only what has been written.

#![forbid(unsafe_code)]

pub mod check;
pub mod command;
pub mod controller;
pub mod health;
pub mod in_effect;
pub mod metrics;
pub mod notice;
mod silent_nodes;
pub mod systemd;
