//! The compiled programs, packet by packet. Needs root; without it each test fails with a sentence that says so.

#![expect(clippy::unwrap_used, reason = "a test fails with the error as it is")]

mod answers;
mod checksums;
mod identity;
mod noise;
mod table;
mod untouched;
mod ways;
