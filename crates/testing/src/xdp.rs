//! Minimal XDP programs, attached without a loader.
//!
//! Frames that a veth sends by XDP_TX only arrive if the other end has an XDP program too. GRO
//! there is not enough: it makes the receive ring, so the frame is queued and counted as sent, but
//! only the presence of a program makes `veth_xdp_flush` wake the receiver (Linux 6.18,
//! drivers/net/veth.c; a redirect, which goes through `ndo_xdp_xmit`, always wakes it).

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use anyhow::{Context, Result};
use traffic_policy_dataplane::sys;

use crate::netns::Namespace;

/// The verdict of a program on every frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Always {
    Drop = 1,
    Pass = 2,
    /// Sends the frame back by the device on which it arrived.
    Transmit = 3,
}

impl Namespace {
    /// Attaches such a program in native mode. It stays as long as the device, or until it is
    /// replaced.
    pub fn attach_xdp(&self, device: &str, program: Always) -> Result<()> {
        let loaded = load(program).context("loading an XDP program")?;
        self.netlink(async |net| net.attach_xdp(device, loaded.as_raw_fd()).await)
    }

    /// Detaches what [`Self::attach_xdp`] attached.
    pub fn detach_xdp(&self, device: &str) -> Result<()> {
        self.netlink(async |net| net.attach_xdp(device, -1).await)
    }
}

fn load(program: Always) -> io::Result<OwnedFd> {
    /// `enum bpf_prog_type`: BPF_PROG_TYPE_XDP
    const XDP: u32 = 6;
    /// BPF_F_XDP_HAS_FRAGS: without it the other end of a veth cannot have an MTU of more than a
    /// page.
    const XDP_HAS_FRAGS: u32 = 1 << 5;
    // r0 = program; exit
    let code = [[0xb7, 0, 0, 0, program as u8, 0, 0, 0], [0x95, 0, 0, 0, 0, 0, 0, 0]];
    sys::load_named("", XDP, &code, c"GPL", XDP_HAS_FRAGS)
}
