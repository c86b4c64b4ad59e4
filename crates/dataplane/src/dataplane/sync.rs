//! Conversion of the desired state to map writes: the plan, the ranges that it allocates, and the
//! application to the maps.

pub mod alloc;
pub mod apply;
pub mod budget;
pub mod former;
pub mod frontend;
pub mod op;
pub mod plan;
pub mod ranges;
pub mod snat_ports;
pub mod tables;
