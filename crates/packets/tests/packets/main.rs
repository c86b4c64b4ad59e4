//! The compiled programs, packet by packet. Needs root; without it each test fails with an
//! explanation.

#![expect(clippy::unwrap_used, reason = "a test fails with the error as it is")]

mod absent;
mod adopted;
mod affinity;
mod answers;
mod associations;
mod checksums;
mod clock;
mod conversation;
mod delivered;
mod dialogue;
mod direct;
mod errors;
mod extensions;
mod forwarding;
mod fragments;
mod fuzz;
mod healed;
mod hops;
mod jumbo;
mod keys;
mod limits;
mod local_delivery;
mod maglev;
mod no_sctp;
mod node_silence;
mod own_ports;
mod owners;
mod passthrough;
mod pod_services;
mod quotes;
mod redirected;
mod renewed;
mod roundtrip;
mod route_mtus;
mod sctp;
mod sources;
mod spoofed;
mod sweeping;
mod table;
mod unassured;
mod windows;
mod without_ethernet;
