//! The smallest XDP programs, attached without any loader.
//!
//! What a veth sends by XDP_TX only arrives if the other end has an XDP program too. GRO there is not enough: it makes
//! the receive ring, so the frame is queued and counted as sent, but only a program's presence makes `veth_xdp_flush` wake
//! the receiver (Linux 6.18, drivers/net/veth.c; a redirect, which goes through `ndo_xdp_xmit`, always wakes it).

use std::io;
use std::mem::size_of;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use anyhow::{Context, Result, ensure};
use nix::libc;

use crate::netns::Namespace;

/// What a program does with every frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Always {
    Drop = 1,
    Pass = 2,
    /// Send it back by the device that it came from.
    Transmit = 3,
}

impl Namespace {
    /// Attaches such a program in native mode. It stays as long as the device, or until another takes its place.
    pub fn attach_xdp(&self, device: &str, program: Always) -> Result<()> {
        let loaded = load(program).context("loading an XDP program")?;
        self.netlink(async |net| net.attach_xdp(device, loaded.as_raw_fd()).await)
    }

    /// Takes away what [`Self::attach_xdp`] attached.
    pub fn detach_xdp(&self, device: &str) -> Result<()> {
        self.netlink(async |net| net.attach_xdp(device, -1).await)
    }
}

/// The arguments of BPF_PROG_LOAD, as far as they are not zero.
#[repr(C)]
#[derive(Default)]
struct Load {
    program_type: u32,
    instructions: u32,
    code: u64,
    license: u64,
    rest: [u64; 13],
}

fn load(program: Always) -> Result<OwnedFd> {
    const PROG_LOAD: libc::c_long = 5;
    const PROG_TYPE_XDP: u32 = 6;
    // r0 = program; exit
    let code: [[u8; 8]; 2] = [[0xb7, 0, 0, 0, program as u8, 0, 0, 0], [0x95, 0, 0, 0, 0, 0, 0, 0]];
    let attributes = Load {
        program_type: PROG_TYPE_XDP,
        instructions: 2,
        code: code.as_ptr() as u64,
        license: c"GPL".as_ptr() as u64,
        ..Load::default()
    };
    // SAFETY: the attributes are as long as said, and the code and license they point to outlive the call.
    let fd = unsafe { libc::syscall(libc::SYS_bpf, PROG_LOAD, &raw const attributes, size_of::<Load>()) };
    ensure!(fd >= 0, io::Error::last_os_error());
    // SAFETY: the call has returned a new descriptor, which nothing else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(fd.try_into()?) })
}
