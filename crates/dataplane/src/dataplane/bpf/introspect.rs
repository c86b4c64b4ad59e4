//! Read-only queries about BPF and devices that need the kernel's system calls.

use std::{collections::BTreeSet, fs, io, mem::size_of, os::fd::AsRawFd, path::Path};

use aya::programs::{
    ProgramError, ProgramInfo, SchedClassifier, TcAttachType,
    links::{FdLink, PinnedLink},
    loaded_programs,
};
use socket2::{Domain, Socket, Type};

use super::{attach::clsact, pins};
use crate::dataplane::sys;

/// A loaded program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Program {
    pub id: u32,
    /// The program's name, of at most 15 bytes; empty if it has none.
    pub name: String,
}

/// Returns the tcx programs at ingress and egress of a device, in the order in which they run.
///
/// # Errors
/// The kernel refuses the query, for lack of privileges or because it has no tcx (before Linux
/// 6.6).
pub fn tcx_programs(device: &str) -> Result<[Vec<Program>; 2], ProgramError> {
    let programs = |hook| -> Result<Vec<Program>, ProgramError> {
        let (_, programs) = SchedClassifier::query_tcx(device, hook)?;
        let named = |info: &ProgramInfo| info.name_as_str().unwrap_or_default().to_owned();
        Ok(programs.iter().map(|info| Program { id: info.id(), name: named(info) }).collect())
    };
    Ok([programs(TcAttachType::Ingress)?, programs(TcAttachType::Egress)?])
}

/// Whether a TC filter with this `tcm_info` and handle is one that [`crate::dataplane::Dataplane`]
/// attaches below Linux 6.6.
pub fn is_own_filter(info: u32, handle: u32) -> bool {
    info >> 16 == u32::from(clsact::PRIORITY) && handle == clsact::HANDLE
}

/// Returns the name of a loaded program, if it has one and may be queried.
pub fn program_name(id: u32) -> Option<String> {
    let program = loaded_programs().filter_map(Result::ok).find(|program| program.id() == id)?;
    program.name_as_str().filter(|name| !name.is_empty()).map(str::to_owned)
}

/// Returns the ids of our programs: those whose links are pinned below `root`.
pub fn pinned_programs(root: &Path) -> BTreeSet<u32> {
    let Ok(entries) = fs::read_dir(pins::links_below(root)) else { return BTreeSet::new() };
    let links = entries.flatten().filter_map(|entry| PinnedLink::from_pin(entry.path()).ok());
    links.filter_map(|link| FdLink::from(link).info().ok()).map(|info| info.program_id()).collect()
}

/// Whether the kernel compiles BPF programs to machine code, determined with a program of two
/// instructions that is released at once. The sysctl net.core.bpf_jit_enable is less suitable: it
/// does not exist in network namespaces other than the initial one.
///
/// # Errors
/// The kernel loads no program, most often for lack of privileges.
pub fn jit() -> io::Result<bool> {
    // linux/bpf.h
    const PROG_TYPE_XDP: u32 = 6;
    // r0 = XDP_PASS; exit
    let program = sys::load(
        PROG_TYPE_XDP,
        &[[0xb7, 0, 0, 0, 2, 0, 0, 0], [0x95, 0, 0, 0, 0, 0, 0, 0]],
        c"Dual MIT/GPL",
    )?;
    // struct bpf_prog_info: type, id, tag (8 bytes), then the length of the machine code.
    let info: [u32; 8] = sys::info(&program)?;
    Ok(info[4] > 0)
}

/// Returns the name of a device's driver, as `ethtool -i` shows it; `None` for devices without one.
pub fn driver(device: &str) -> Option<String> {
    const SIOCETHTOOL: libc::Ioctl = 0x8946;
    const ETHTOOL_GDRVINFO: u32 = 3;
    /// `struct ethtool_drvinfo`, of which only the name is read.
    #[repr(C)]
    struct Info {
        command: u32,
        driver: [u8; 32],
        rest: [u8; 160],
    }
    let socket = Socket::new(Domain::IPV4, Type::DGRAM, None).ok()?;
    let mut info = Info { command: ETHTOOL_GDRVINFO, driver: [0; 32], rest: [0; 160] };
    // SAFETY: an all-zero ifreq is a valid value of that plain C struct.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    if device.len() >= request.ifr_name.len() {
        return None;
    }
    for (to, from) in request.ifr_name.iter_mut().zip(device.bytes()) {
        *to = from as libc::c_char;
    }
    request.ifr_ifru.ifru_data = (&raw mut info).cast();
    const { assert!(size_of::<Info>() == 196) };
    // SAFETY: the request names a device and points to a value that outlives the call and has the
    // size that the kernel writes.
    let result = unsafe { libc::ioctl(socket.as_raw_fd(), SIOCETHTOOL, &raw mut request) };
    let name = info.driver.split(|byte| *byte == 0).next().unwrap_or_default();
    (result == 0 && !name.is_empty()).then(|| String::from_utf8_lossy(name).into_owned())
}

/// Returns the size of a memory page, in bytes.
pub fn page_size() -> usize {
    // SAFETY: sysconf has no preconditions.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(size).unwrap_or(4096)
}

/// Returns the number of possible CPUs, plugged in or not, as the kernel counts them for drivers
/// (`nr_cpu_ids`).
pub fn possible_cpus() -> u32 {
    aya::util::nr_cpus().ok().and_then(|cpus| u32::try_from(cpus).ok()).unwrap_or(1)
}
