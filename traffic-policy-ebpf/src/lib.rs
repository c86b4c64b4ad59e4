//! The code shared by the packet path and its users: map layouts, outcomes and the pure arithmetic
//! on packets.
//!
//! It is compiled for both sides, so there is one definition of each layout. Nothing here does
//! input or output, and all of it is tested on the host.
#![cfg_attr(target_arch = "bpf", no_std)]

pub mod abi;
pub mod checksum;
pub mod crc32c;
pub mod hash;
pub mod outcome;
pub mod sctp;
pub mod tcp;
