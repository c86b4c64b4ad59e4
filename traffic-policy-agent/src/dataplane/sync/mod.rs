//! From what is desired to writes: the plan, the places it hands out, and its application to the maps.

pub mod alloc;
pub mod apply;
pub mod frontend;
pub mod op;
pub mod plan;
pub mod ranges;
pub mod snat_ports;
