//! `lb` as a person runs it from outside of the cluster: real agents are asked.
//! Needs root; without it each test fails with a sentence that says so.

#![expect(clippy::unwrap_used, reason = "a test fails with the error as it is")]

mod probe;
