//! The lab itself, with real packets: the reachability in it, the accuracy of the meters, and the
//! removal of all its parts. Needs root; without it each test fails with an explanation.

#![expect(clippy::unwrap_used, reason = "a test fails with the error as it is")]

mod meters;
mod reach;
mod remains;
mod wire;
