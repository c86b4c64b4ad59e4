//! The lab itself, on real packets: what reaches what, that the meters see what they should, and that nothing stays
//! behind. Needs root; without it each test fails with a sentence that says so.

#![expect(clippy::unwrap_used, reason = "a test fails with the error as it is")]

mod meters;
mod reach;
mod remains;
mod wire;
