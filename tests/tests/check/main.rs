//! `check` in namespaces with one fault each: it is found with its fix, and not reported where
//! there is none. Needs root; without it each test fails with an explanation.

#![expect(clippy::unwrap_used, reason = "a test fails with the error as it is")]

mod devices;
mod direct;
mod firewall;
mod migrate;
mod output;
mod ports;
mod verifier;
mod whole;
