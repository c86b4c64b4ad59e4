//! TC programs below Linux 6.6: filters of a clsact qdisc, which have no link to pin and are
//! recognised by their priority and handle.

use anyhow::Result;
use aya::programs::{
    Link as _, SchedClassifier, TcAttachType,
    tc::{self, NlOptions, SchedClassifierLink, TcAttachOptions, TcHandle},
};
use nix::net::if_::if_indextoname;

pub const PRIORITY: u16 = 0x7470;
pub const HANDLE: u32 = 1;

/// Attaches a program; that of an earlier agent is replaced.
pub fn attach(program: &mut SchedClassifier, device: &str, attach_type: TcAttachType) -> Result<()> {
    // The qdisc may exist already.
    let _ = tc::qdisc_add_clsact(device);
    let handle = TcHandle::from(HANDLE);
    let options = TcAttachOptions::Netlink(NlOptions { priority: PRIORITY, handle, ..Default::default() });
    let id = match program.attach_with_options(device, attach_type, options) {
        Ok(id) => id,
        Err(_) => {
            let old = SchedClassifierLink::attached(device, attach_type, PRIORITY, handle, None)?;
            program.attach_to_link(old)?
        }
    };
    // No handle holds the filter; forgetting the link leaves the filter in place.
    std::mem::forget(program.take_link(id)?);
    Ok(())
}

/// Removes our filters from a device, if there are any.
pub fn detach(ifindex: u32) {
    detach_at(ifindex, TcAttachType::Ingress);
    detach_at(ifindex, TcAttachType::Egress);
}

/// Removes our filter at one hook of a device, if there is one.
pub fn detach_at(ifindex: u32, attach_type: TcAttachType) {
    let Ok(device) = if_indextoname(ifindex) else { return };
    let device = device.to_string_lossy();
    let link = SchedClassifierLink::attached(&device, attach_type, PRIORITY, TcHandle::from(HANDLE), None);
    if let Some(error) = link.ok().and_then(|link| link.detach().err()) {
        tracing::debug!(%device, "no filter to take off: {error}");
    }
}
