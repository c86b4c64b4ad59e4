//! Programs on devices and cgroups.

pub mod cgroup;
pub mod clsact;
pub mod device;
pub mod drivers;
mod interface;
pub mod release;
mod xdp_errors;

pub use self::{
    cgroup::Cgroup,
    device::{Attached, Mode},
    interface::Interface,
};
