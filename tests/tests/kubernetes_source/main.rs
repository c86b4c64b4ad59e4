//! The Kubernetes source with an API server that shows the faults of real ones.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod access;
mod connections;
mod events;
mod fixture;
mod follow;
mod leaving;
mod opening;
mod service_cidrs;
mod silence;
