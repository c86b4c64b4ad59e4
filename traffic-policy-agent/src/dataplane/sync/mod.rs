//! From the desired state to map writes: the plan, the ranges that it hands out, and the application to the maps.

pub mod alloc;
pub mod apply;
pub mod frontend;
pub mod op;
pub mod plan;
pub mod ranges;
pub mod snat_ports;

/// Service ports, and slots of each family: as the maps are declared.
pub const PLAN_SIZES: plan::Sizes = plan::Sizes { slots: 262_144, services: 65_536 };
