//! `explain` runs the real programs: it agrees with the handling of packets on the wire, follows
//! the maps, changes nothing, and is quick. Needs root.

#![expect(clippy::unwrap_used, reason = "a test fails with the error as it is")]

mod chi_square;
mod input;
mod many;
mod offline;
mod program;
mod unchanged;
mod wire;
