//! The code shared by the packet path and its users: map layouts, outcomes and the pure arithmetic
//! on packets.
//!
//! It is compiled for both sides, so there is one definition of each layout. Nothing here does
//! input or output, and all of it is tested on the host. Two modules are for the BPF target alone:
//! the instructions `barrier` and `words`, which the programs of the bench use, too.
#![cfg_attr(target_arch = "bpf", no_std, feature(asm_experimental_arch))]

pub mod abi;
#[cfg(target_arch = "bpf")]
pub mod barrier;
pub mod checksum;
pub mod crc32c;
pub mod hash;
pub mod outcome;
pub mod sctp;
pub mod tcp;
#[cfg(target_arch = "bpf")]
pub mod words;
