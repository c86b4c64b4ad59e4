//! Nothing is lost when the agent is killed, restarted or stopped, when endpoints change while no
//! agent runs, when a policy is switched under load, or in a flood. With real agents and sockets.
//! Needs root; without it each test fails with an explanation.
//!
//! The figures are printed: `cargo test -p traffic-policy-tests --test loss -- --nocapture`.

#![expect(clippy::unwrap_used, reason = "a test fails with the error as it is")]

mod adopt;
mod adopt_sctp;
mod churn;
mod cluster;
mod control;
mod crowd;
mod dead_node;
mod demo;
mod direct;
mod distant;
mod endpoints;
mod flood;
mod health_gap;
mod meters;
mod other_object;
mod outlive;
mod preemption;
mod quiet;
mod restart;
mod simulated;
mod switch;
mod upgrade;
mod uplink;
mod writes;
