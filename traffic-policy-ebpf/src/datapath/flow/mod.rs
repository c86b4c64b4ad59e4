//! Flows: their entries and states, the source port of a new flow, and the removal of old flows.

pub mod associations;
pub mod datagrams;
pub mod delivered;
pub mod first_packet;
pub mod gc;
pub mod recycle;
pub mod silence;
pub mod snat_port;
pub mod state;
pub mod table;
pub mod unassured;
