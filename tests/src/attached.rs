//! Which BPF programs are on a device, asked of the kernel.

use std::io;
use std::mem::size_of;

use anyhow::{Result, ensure};
use nix::libc;

use crate::netlink;
use crate::netns::Namespace;

/// The programs of one device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Attached {
    pub xdp: bool,
    /// Number of programs at TC ingress and egress.
    pub ingress: u32,
    pub egress: u32,
}

impl Namespace {
    pub fn attached(&self, device: &str) -> Result<Attached> {
        let xdp = self.netlink(async |net| net.has_xdp(device).await)?;
        self.run(|| {
            let index = netlink::index(device)?;
            let (ingress, egress) = (query(index, TCX_INGRESS)?, query(index, TCX_EGRESS)?);
            Ok(Attached { xdp, ingress, egress })
        })
    }
}

// linux/bpf.h, enum bpf_attach_type
const TCX_INGRESS: u32 = 46;
const TCX_EGRESS: u32 = 47;

/// The arguments of BPF_PROG_QUERY.
#[repr(C)]
#[derive(Default)]
struct Query {
    device: u32,
    attach_type: u32,
    query_flags: u32,
    attach_flags: u32,
    programs: u64,
    count: u32,
    rest: [u32; 9],
}

fn query(device: u32, attach_type: u32) -> Result<u32> {
    const PROG_QUERY: libc::c_long = 16;
    let mut query = Query { device, attach_type, ..Query::default() };
    // SAFETY: the attributes are as long as said; without room for programs the kernel writes their number only.
    let result = unsafe { libc::syscall(libc::SYS_bpf, PROG_QUERY, &raw mut query, size_of::<Query>()) };
    let error = io::Error::last_os_error();
    // ENOENT: nothing was ever attached here.
    if result < 0 && error.raw_os_error() == Some(libc::ENOENT) {
        return Ok(0);
    }
    ensure!(result == 0, "asking for the programs of device {device}: {error}");
    Ok(query.count)
}
