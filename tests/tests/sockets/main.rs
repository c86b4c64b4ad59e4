//! Connections made on a node, by its own processes and by its pods, with real sockets in cgroups
//! of the tests' own. Needs root.

#![expect(clippy::unwrap_used, reason = "a test fails with the error as it is")]

mod affinity;
mod changes;
mod conversations;
mod cost;
mod destroyed;
mod explained;
mod fixture;
mod lifecycle;
mod node_ports;
mod refusals;
mod silent_nodes;
mod source_ranges;
mod uniform;
