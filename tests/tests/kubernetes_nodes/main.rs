//! The Kubernetes source end to end: agents on the nodes of a lab that follow an API server, and
//! real traffic. Needs root; without it each test fails with an explanation.

#![expect(clippy::unwrap_used, reason = "a test fails with the error as it is")]

mod black_box;
mod real_api;
mod small_api;
mod told;
