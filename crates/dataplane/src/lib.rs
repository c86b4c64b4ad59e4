//! The packet path as user space sees it: its maps and programs, the node's devices and neighbours, what is read back from the pins,
//! and what becomes of a packet. The only crate that names `aya` and netlink, or says `unsafe`.

#![deny(unsafe_code)]

pub mod advice;
#[expect(unsafe_code, reason = "bpf(2), mapped maps and ioctls are asked for here alone")]
mod dataplane;
pub mod explain;
pub mod inspect;
pub mod node;

pub use dataplane::*;

/// Whether the packet path was compiled: without a BPF toolchain the crate is built without the object.
pub const HAS_OBJECT: bool = cfg!(bpf_object);
