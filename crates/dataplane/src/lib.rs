//! The packet path as user space sees it: its maps and programs, the node's devices and neighbours,
//! inspection through the pins, and the simulation of packets. Beside tests and the
//! bench, the only crate of user space that depends on `aya` and netlink; the crates of the agent,
//! of the plugin and of the model forbid `unsafe`.

#![deny(unsafe_code)]

pub mod advice;
#[expect(unsafe_code, reason = "bpf(2), mapped maps and ioctls are asked for here alone")]
mod dataplane;
mod dispatch;
pub mod explain;
pub mod inspect;
pub mod node;

pub use dataplane::*;

/// Whether the packet path was compiled: without a BPF toolchain the crate is built without the
/// object.
pub const HAS_OBJECT: bool = cfg!(bpf_object);
