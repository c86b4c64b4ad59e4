//! The BPF programs that the kernel has attached to a device or a cgroup.

use std::ffi::CString;
use std::fs::{self, File};
use std::io;
use std::mem::{size_of, size_of_val};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use nix::libc;
use traffic_policy_dataplane::sys;

use crate::netlink;
use crate::netns::Namespace;

/// The programs of one device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Attached {
    pub xdp: bool,
    /// The number of programs at TC ingress and egress: links of tcx, or filters of clsact where
    /// the kernel has no tcx.
    pub ingress: u32,
    pub egress: u32,
}

impl Namespace {
    pub fn attached(&self, device: &str) -> Result<Attached> {
        let xdp = self.netlink(async |net| net.has_xdp(device).await)?;
        let by_tcx = self.run(|| -> Result<_> {
            let index = netlink::index(device)?;
            Ok(query(index, TCX_INGRESS)?.zip(query(index, TCX_EGRESS)?))
        })?;
        // On a kernel with tcx the agent attaches no filter.
        let (ingress, egress) = match by_tcx {
            Some(counts) => counts,
            None => self.netlink(async |net| net.bpf_filters(device).await)?,
        };
        Ok(Attached { xdp, ingress, egress })
    }
}

impl Namespace {
    /// Attaches a program of another at TC ingress or egress of a device, which leaves every packet
    /// to the next one. It stays until the descriptor is closed. `None`: the kernel has no tcx
    /// (before Linux 6.6).
    pub fn attach_foreign(&self, device: &str, ingress: bool) -> Result<Option<OwnedFd>> {
        const LINK_CREATE: libc::c_long = 28;
        /// `enum bpf_prog_type`: BPF_PROG_TYPE_SCHED_CLS
        const SCHED_CLS: u32 = 3;
        // r0 = TCX_NEXT; exit
        let code = [[0xb7, 0, 0, 0, 0xff, 0xff, 0xff, 0xff], [0x95, 0, 0, 0, 0, 0, 0, 0]];
        self.run(|| {
            let index = netlink::index(device)?;
            let hook = if ingress { TCX_INGRESS } else { TCX_EGRESS };
            if programs(index, hook)?.is_none() {
                return Ok(None);
            }
            let program = sys::load_named("foreign", SCHED_CLS, &code, c"GPL", 0)?;
            let mut create = [u32::try_from(program.as_raw_fd())?, index, hook, 0, 0, 0, 0, 0];
            // SAFETY: the attributes are as long as the given size.
            let link =
                unsafe { libc::syscall(libc::SYS_bpf, LINK_CREATE, &raw mut create, size_of_val(&create)) };
            ensure!(link >= 0, "{}", io::Error::last_os_error());
            // SAFETY: the call has returned a new descriptor, which nothing else owns.
            Ok(Some(unsafe { OwnedFd::from_raw_fd(link.try_into()?) }))
        })
    }
}

/// Detaches each program whose link is pinned below an agent's `--pin-dir` under a name that begins
/// with `prefix`, as `bpftool link detach` does. Returns the number of these links.
pub fn detach_links(pin_dir: &Path, prefix: &str) -> Result<usize> {
    let mut detached = 0;
    for version in fs::read_dir(pin_dir)? {
        for link in fs::read_dir(version?.path().join("links"))? {
            let link = link?;
            if link.file_name().to_string_lossy().starts_with(prefix) {
                detach_link(&link.path()).with_context(|| format!("detaching {}", link.path().display()))?;
                detached += 1;
            }
        }
    }
    Ok(detached)
}

fn detach_link(pin: &Path) -> Result<()> {
    const OBJ_GET: libc::c_long = 7;
    const LINK_DETACH: libc::c_long = 34;
    let path = CString::new(pin.as_os_str().as_bytes())?;
    let mut get = [path.as_ptr() as u64, 0];
    // SAFETY: the attributes are as long as the given size, and the path outlives the call.
    let link = unsafe { libc::syscall(libc::SYS_bpf, OBJ_GET, &raw mut get, size_of_val(&get)) };
    ensure!(link >= 0, "{}", io::Error::last_os_error());
    // SAFETY: the call has returned a new descriptor, which nothing else owns.
    let link = unsafe { OwnedFd::from_raw_fd(link.try_into()?) };
    let mut detach = link.as_raw_fd();
    // SAFETY: the attributes are one descriptor.
    let result = unsafe { libc::syscall(libc::SYS_bpf, LINK_DETACH, &raw mut detach, size_of_val(&detach)) };
    ensure!(result == 0, "{}", io::Error::last_os_error());
    Ok(())
}

/// The ids of the programs of a cgroup for connect4, connect6, sendmsg4, sendmsg6, recvmsg4,
/// recvmsg6, getpeername4, getpeername6, the release of sockets, and callbacks of TCP sockets.
pub fn socket_programs(cgroup: &Path) -> Result<[Vec<u32>; 10]> {
    let cgroup = File::open(cgroup)?;
    let mut found = [const { Vec::new() }; 10];
    for (place, attach_type) in found.iter_mut().zip(SOCKET) {
        let found = programs(cgroup.as_raw_fd().try_into()?, attach_type)?;
        *place = found.context("the kernel has no such attach type")?;
    }
    Ok(found)
}

// linux/bpf.h, enum bpf_attach_type
const TCX_INGRESS: u32 = 46;
const TCX_EGRESS: u32 = 47;
const SOCKET: [u32; 10] = [10, 11, 14, 15, 19, 20, 29, 30, 34, 3];

/// The arguments of BPF_PROG_QUERY.
#[repr(C)]
#[derive(Default)]
struct Query {
    /// The index of a device, or a file descriptor.
    target: u32,
    attach_type: u32,
    query_flags: u32,
    attach_flags: u32,
    programs: u64,
    count: u32,
    rest: [u32; 9],
}

fn query(target: u32, attach_type: u32) -> Result<Option<u32>> {
    Ok(programs(target, attach_type)?.map(|found| found.len() as u32))
}

/// The ids of the programs of one attach type; `None` if the kernel does not know the type, as that
/// of tcx below Linux 6.6.
fn programs(target: u32, attach_type: u32) -> Result<Option<Vec<u32>>> {
    const PROG_QUERY: libc::c_long = 16;
    let mut numbers = [0_u32; 64];
    let mut query = Query {
        target,
        attach_type,
        programs: numbers.as_mut_ptr() as u64,
        count: numbers.len() as u32,
        ..Query::default()
    };
    // SAFETY: the attributes are as long as the given size, and the buffer has room for that many
    // ids.
    let result = unsafe { libc::syscall(libc::SYS_bpf, PROG_QUERY, &raw mut query, size_of::<Query>()) };
    let error = io::Error::last_os_error();
    match (result, error.raw_os_error()) {
        (0, _) => Ok(Some(numbers[..query.count as usize].to_vec())),
        // Nothing was ever attached here.
        (_, Some(libc::ENOENT)) => Ok(Some(Vec::new())),
        (_, Some(libc::EINVAL)) => Ok(None),
        _ => Err(error).with_context(|| format!("asking for the programs of {target}")),
    }
}
