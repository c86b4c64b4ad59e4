//! The node agent of traffic-policy.
//!
//! Data flows one way: a [`source`] of Kubernetes objects fills the [`model`], the model says what the maps should
//! hold, and the data plane writes the difference; the [`health`] servers speak only of what has been written.

#![deny(unsafe_code)]

pub mod advice;
pub mod check;
pub mod command;
pub mod controller;
#[expect(unsafe_code, reason = "bpf(2), mapped maps and ioctls are asked for here alone")]
pub mod dataplane;
pub mod explain;
pub mod health;
pub mod in_effect;
pub mod inspect;
pub mod lb;
pub mod metrics;
pub mod model;
pub mod node;
pub mod page;
pub mod source;
pub mod systemd;
