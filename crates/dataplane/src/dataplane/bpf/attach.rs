//! Programs on devices and cgroups.

pub mod cgroup;
pub mod clsact;
pub mod device;
pub mod divider;
pub mod drivers;
mod interface;
pub mod pod;
pub mod release;
mod tc;
mod xdp_errors;

pub use self::{
    cgroup::Cgroup,
    device::{Attached, Mode},
    interface::Interface,
};
