//! `lb` as a person runs it from outside of the cluster: real agents are asked, and changes are watched.
//! Needs root; without it each test fails with a sentence that says so.

#![expect(clippy::unwrap_used, reason = "a test fails with the error as it is")]

mod agreement;
mod probe;
mod watch;
