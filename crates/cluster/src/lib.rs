//! Objects of a cluster, and the state that each node should have.
//!
//! A [`source`] of Kubernetes objects fills the [`model`], and the model computes what the maps of
//! a node should hold. This is the only crate that knows the Kubernetes API. [`command`] has the
//! parts that all command lines share.

#![forbid(unsafe_code)]

pub mod command;
pub mod model;
pub mod source;
