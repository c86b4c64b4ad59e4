//! Modules of several suites: processes that make socket calls, and the state of a node in the
//! kernel.

#![expect(clippy::unwrap_used, reason = "a test fails with the error as it is")]

pub mod caller;
pub mod remains;
