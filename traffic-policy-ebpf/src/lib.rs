//! The code shared by the packet path and its users: map layouts, outcomes and the pure arithmetic
//! on packets.
//!
//! It is compiled for both sides, so there is one definition of each layout. Nothing here does
//! input or output, and all of it is tested on the host. Two modules are for the BPF target alone:
//! the instructions `barrier` and `words`, which the programs of the bench use, too. The parser of
//! the packet path belongs to the programs; its tests compile it here, for the host.
#![cfg_attr(target_arch = "bpf", no_std, feature(asm_experimental_arch))]

/// The name by which the packet path knows this library.
#[cfg(test)]
extern crate self as traffic_policy_ebpf;

pub mod abi;
#[cfg(target_arch = "bpf")]
pub mod barrier;
pub mod checksum;
pub mod crc32c;
#[cfg(test)]
#[expect(dead_code, unused_macros, reason = "of the packet path only what parses packets is run here")]
mod datapath {
    #[macro_use]
    pub mod value;

    mod host;
    pub mod parse;

    pub use self::host::{barrier, ctx, family, verdict, words};
}
pub mod hash;
pub mod outcome;
pub mod sctp;
pub mod tcp;
#[cfg(target_arch = "bpf")]
pub mod words;
