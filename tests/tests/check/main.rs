//! `check` in namespaces that have one thing wrong each: it is found with its fix, and not found where it is right.
//! Needs root; without it each test fails with a sentence that says so.

#![expect(clippy::unwrap_used, reason = "a test fails with the error as it is")]

mod devices;
mod firewall;
mod migrate;
mod ports;
mod said;
mod verifier;
mod whole;
