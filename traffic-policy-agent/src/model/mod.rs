//! What the maps should hold, in the terms of Kubernetes. Pure: no kube types, no aya types, no input or output.
//!
//! A source fills an [`Index`] with [`object`]s; [`Index::update`] keeps a [`Desired`] state up to date with them.

#![forbid(unsafe_code)]

pub mod address;
mod choose;
mod claims;
mod desired;
mod duration;
mod index;
pub mod object;
mod reduce;
mod render;

pub use desired::{
    Desired, Endpoint, Frontend, FrontendKind, HealthCheck, Policy, Protocol, ServiceName, ServicePort,
    ServicePortKey, Warning,
};
pub use duration::parse_duration;
pub use index::{Changes, Index, Indexed, NodeInput};
pub use render::render;
