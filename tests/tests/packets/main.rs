//! The compiled programs, packet by packet. Needs root; without it each test fails with a sentence that says so.

#![expect(clippy::unwrap_used, reason = "a test fails with the error as it is")]

mod affinity;
mod answers;
mod checksums;
mod clock;
mod conversation;
mod errors;
mod extensions;
mod fragments;
mod hops;
mod identity;
mod keys;
mod limits;
mod noise;
mod pending;
mod quotes;
mod renewed;
mod sweeping;
mod table;
mod talk;
mod untouched;
mod ways;
