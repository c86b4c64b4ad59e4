//! Invalid input and faults: each has a clear message or a counted outcome, and traffic of other
//! Services goes on. Needs root; without it each test fails with an explanation.

#![expect(clippy::unwrap_used, reason = "a test fails with the error as it is")]

mod addresses;
mod commands;
mod configuration;
mod cut_off;
mod devices;
mod failed_neighbours;
mod full;
mod left_out;
mod listeners;
mod living_nodes;
mod objects;
mod other_layout;
mod ports;
mod privileges;
mod silent_hops;
mod silent_nodes;
mod start;
mod stopped;
mod taken_off;
mod watched;
