//! Which BPF programs are on a device or a cgroup, asked of the kernel.

use std::fs::File;
use std::io;
use std::mem::size_of;
use std::os::fd::AsRawFd;
use std::path::Path;

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

/// Numbers of the programs of a cgroup for connect4, connect6, sendmsg4, sendmsg6, recvmsg4, recvmsg6, getpeername4,
/// getpeername6 and the closing of sockets.
pub fn socket_programs(cgroup: &Path) -> Result<[Vec<u32>; 9]> {
    let cgroup = File::open(cgroup)?;
    let mut found = [const { Vec::new() }; 9];
    for (place, attach_type) in found.iter_mut().zip(SOCKET) {
        *place = programs(cgroup.as_raw_fd().try_into()?, attach_type)?;
    }
    Ok(found)
}

// linux/bpf.h, enum bpf_attach_type
const TCX_INGRESS: u32 = 46;
const TCX_EGRESS: u32 = 47;
const SOCKET: [u32; 9] = [10, 11, 14, 15, 19, 20, 29, 30, 34];

/// The arguments of BPF_PROG_QUERY.
#[repr(C)]
#[derive(Default)]
struct Query {
    /// The number of a device, or a descriptor.
    target: u32,
    attach_type: u32,
    query_flags: u32,
    attach_flags: u32,
    programs: u64,
    count: u32,
    rest: [u32; 9],
}

fn query(target: u32, attach_type: u32) -> Result<u32> {
    Ok(programs(target, attach_type)?.len() as u32)
}

fn programs(target: u32, attach_type: u32) -> Result<Vec<u32>> {
    const PROG_QUERY: libc::c_long = 16;
    let mut numbers = [0_u32; 64];
    let mut query = Query {
        target,
        attach_type,
        programs: numbers.as_mut_ptr() as u64,
        count: numbers.len() as u32,
        ..Query::default()
    };
    // SAFETY: the attributes are as long as said, and there is room for that many programs.
    let result = unsafe { libc::syscall(libc::SYS_bpf, PROG_QUERY, &raw mut query, size_of::<Query>()) };
    let error = io::Error::last_os_error();
    // ENOENT: nothing was ever attached here.
    if result < 0 && error.raw_os_error() == Some(libc::ENOENT) {
        return Ok(Vec::new());
    }
    ensure!(result == 0, "asking for the programs of {target}: {error}");
    Ok(numbers[..query.count as usize].to_vec())
}
