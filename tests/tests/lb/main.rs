//! `lb` as a user runs it from outside of the cluster: real agents are probed, and changes are
//! watched. Needs root; without it each test fails with an explanation.

#![expect(clippy::unwrap_used, reason = "a test fails with the error as it is")]

mod agreement;
mod probe;
mod watch;
