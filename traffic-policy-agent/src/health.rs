//! Answers to load balancers and probes.
//!
//! They reflect only written state: the run loop informs [`ProxyHealth`] when a change is waiting
//! and when it is in the maps, and updates [`ServiceHealth`] after each write, so that no load
//! balancer sends before the node can forward.

#![forbid(unsafe_code)]

mod connections;
mod listener;
mod proxy;
mod report;
mod service;

pub use connections::Connections;
pub(crate) use listener::not_found;
#[cfg(test)]
pub(crate) use listener::tests;
pub use listener::{Answer, Served};
pub use proxy::{Answered, HealthzServer, ProxyHealth};
pub use report::{DirectForwarding, EndpointLeftOut, NodeLeftOut, Report, StaleKind};
pub use service::{ListenFailure, ServiceHealth};
