//! The packet path on network cards with a driver of hardware (virtio_net), and on devices made from others: VLAN, bond, tunnels.
//!
//! Runs in a machine that `cargo xtask vm test drivers` boots, which has pairs of network cards joined to each other ("wires");
//! elsewhere each test says that it is skipped.

#![expect(clippy::unwrap_used, reason = "a test fails with the error as it is")]

mod changed;
mod check;
mod fixture;
mod flows;
mod kinds;
mod matrix;
mod refused;
mod wires;
