//! The packet path on network cards with a hardware driver (virtio_net), and on virtual devices:
//! VLAN, bond, tunnels.
//!
//! The tests run in a machine that `cargo xtask vm test drivers` boots, which has pairs of
//! connected network cards ("wires"); elsewhere each test reports that it is skipped.

#![expect(clippy::unwrap_used, reason = "a test fails with the error as it is")]

mod changed;
mod check;
mod fixture;
mod flows;
mod kinds;
mod local_delivery;
mod matrix;
mod refused;
mod wires;
