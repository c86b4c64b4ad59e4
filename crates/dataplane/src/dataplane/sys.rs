//! Wrappers of bpf(2) for commands that aya 0.14 does not offer.

use std::{
    ffi::{CStr, CString},
    fs::File,
    io,
    os::{
        fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::Path,
};

use aya::{Pod, maps::MapError};

/// The commands of linux/bpf.h, enum bpf_cmd.
pub mod command {
    pub const MAP_LOOKUP: libc::c_int = 1;
    pub const PROG_LOAD: libc::c_int = 5;
    pub const OBJ_GET: libc::c_int = 7;
    pub const PROG_GET_FD_BY_ID: libc::c_int = 13;
    pub const OBJ_GET_INFO_BY_FD: libc::c_int = 15;
    pub const PROG_QUERY: libc::c_int = 16;
    pub const MAP_LOOKUP_BATCH: libc::c_int = 24;
    pub const MAP_UPDATE_BATCH: libc::c_int = 26;
    pub const LINK_CREATE: libc::c_int = 28;
    pub const LINK_UPDATE: libc::c_int = 29;
    pub const ITER_CREATE: libc::c_int = 33;
    pub const LINK_DETACH: libc::c_int = 34;
}

/// The flag of an update that inserts only.
pub const BPF_NOEXIST: u64 = 1;
/// BPF_OBJ_NAME_LEN, including the terminating zero.
const PROGRAM_NAME: usize = 16;
/// BPF_F_RDONLY
const READ_ONLY: u32 = 1 << 3;

/// Returns the error number of bpf(2), if that has failed.
pub fn error_number(error: &MapError) -> Option<i32> {
    if let MapError::SyscallError(error) = error { error.io_error.raw_os_error() } else { None }
}

// The types below are the parts of `union bpf_attr` that the commands read.

/// The attributes of the commands on one element of a map.
#[repr(C)]
#[derive(Debug, Default)]
pub struct Element {
    pub fd: u32,
    pub zero: u32,
    /// The addresses of a key and a value, of the sizes that the map has.
    pub key: u64,
    pub value: u64,
    pub flags: u64,
}

/// The attributes of the commands on many elements.
#[repr(C)]
#[derive(Debug, Default)]
pub struct Batch {
    /// The addresses of the position to start from, 0 for the first one, and of memory for the
    /// position to continue from.
    pub from: u64,
    pub to: u64,
    /// The addresses of keys and values.
    pub keys: u64,
    pub values: u64,
    /// The number of elements that there is room for, or that are to be written; after the call,
    /// the number that were read or written.
    pub count: u32,
    pub fd: u32,
    pub element_flags: u64,
    pub flags: u64,
}

#[repr(C)]
struct Get {
    path: u64,
    fd: u32,
    flags: u32,
}

#[repr(C)]
struct Info {
    fd: u32,
    length: u32,
    info: u64,
}

#[repr(C)]
struct Load {
    kind: u32,
    instructions: u32,
    code: u64,
    license: u64,
    /// The level (u32), size in bytes (u32) and address (u64) of the verifier's log; all 0 for
    /// none.
    log: [u64; 2],
    kernel_version: u32,
    flags: u32,
    name: [u8; PROGRAM_NAME],
}

#[repr(C)]
struct Attach {
    program: i32,
    target: i32,
    kind: u32,
    flags: u32,
    /// The address of a `union bpf_iter_link_info`, which begins with a map's descriptor.
    what: u64,
    what_length: u32,
    zero: u32,
}

/// enum bpf_attach_type: BPF_TRACE_ITER
const ITERATOR: u32 = 28;

#[repr(C)]
struct Read {
    link: i32,
    flags: u32,
}

#[repr(C)]
#[derive(Default)]
struct Query {
    device: u32,
    hook: u32,
    flags: u32,
    attach_flags: u32,
    /// The address of program ids, and their number; 0: only their number is returned.
    programs: u64,
    count: u32,
    zero: u32,
    /// Flags of programs, ids of links, their flags.
    more: [u64; 3],
    revision: u64,
}

#[repr(C)]
struct Update {
    link: i32,
    program: i32,
    flags: u32,
    old_program: u32,
}

/// Calls bpf(2) with the attributes of a command.
///
/// # Safety
/// `T` begins like `union bpf_attr` for this command, and all its pointers are valid for the
/// command's reads and writes.
pub unsafe fn call<T>(command: libc::c_int, attributes: &mut T) -> io::Result<libc::c_int> {
    // SAFETY: the attributes are as long as stated; the caller guarantees the rest.
    let result =
        unsafe { libc::syscall(libc::SYS_bpf, command, std::ptr::from_mut(attributes), size_of::<T>()) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result as libc::c_int) }
}

/// Calls bpf(2) with the attributes of a command that creates a descriptor.
///
/// # Safety
/// See [`call`]; the command must be one that creates a descriptor.
unsafe fn make<T>(command: libc::c_int, attributes: &mut T) -> io::Result<OwnedFd> {
    // SAFETY: the kernel has just created this descriptor, and it has no other owner; the caller
    // guarantees the rest.
    unsafe { Ok(OwnedFd::from_raw_fd(call(command, attributes)?)) }
}

/// Returns the ids of at most 64 programs at a hook of a device: tcx, netkit (enum
/// bpf_attach_type).
pub fn programs_of_device(device: u32, hook: u32) -> io::Result<Vec<u32>> {
    // The kernel allows 64: BPF_MPROG_MAX.
    let mut ids = vec![0u32; 64];
    let count = ids.len() as u32;
    let mut query = Query { device, hook, programs: ids.as_mut_ptr() as u64, count, ..Query::default() };
    // SAFETY: the kernel writes at most `count` ids, which outlive the call.
    unsafe { call(command::PROG_QUERY, &mut query)? };
    ids.truncate(query.count as usize);
    Ok(ids)
}

/// Opens a pin: that of a map for reading, that of a link as it is.
pub fn open(pin: &Path, read_only: bool) -> io::Result<OwnedFd> {
    let path = CString::new(pin.as_os_str().as_bytes())?;
    let flags = if read_only { READ_ONLY } else { 0 };
    // SAFETY: the path outlives the call.
    unsafe { make(command::OBJ_GET, &mut Get { path: path.as_ptr() as u64, fd: 0, flags }) }
}

/// Returns the first bytes of the kernel's description of a map, program or link.
pub fn info<T: Pod + Default>(fd: &OwnedFd) -> io::Result<T> {
    let mut info = T::default();
    let length = u32::try_from(size_of::<T>()).map_err(io::Error::other)?;
    let mut attributes = Info { fd: fd.as_raw_fd().cast_unsigned(), length, info: (&raw mut info) as u64 };
    // SAFETY: the kernel writes at most the given length, and any bytes are a valid `T`.
    unsafe { call(command::OBJ_GET_INFO_BY_FD, &mut attributes)? };
    Ok(info)
}

/// The first fields of `struct bpf_link_info`. `target` is the device's number for XDP and tcx, 0
/// once it is gone, and the cgroup's for cgroups.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct LinkInfo {
    pub kind: u32,
    pub id: u32,
    pub program: u32,
    pub pad: u32,
    pub target: [u32; 2],
    pub more: [u32; 6],
}

// SAFETY: it consists of numbers without gaps; any bytes are a valid value.
unsafe impl Pod for LinkInfo {}

/// Returns the kernel's description of a pinned link.
pub fn link_info(pin: &Path) -> io::Result<LinkInfo> {
    info(&open(pin, false)?)
}

/// Loads a program without relocations or BTF. `kind`: see `enum bpf_prog_type`.
///
/// # Errors
/// The verifier refuses the program, or privileges are missing.
pub fn load(kind: u32, code: &[[u8; 8]], license: &CStr) -> io::Result<OwnedFd> {
    load_named("", kind, code, license, 0)
}

/// Loads a program like [`load`], with a name of at most 15 letters, digits and underscores, and
/// flags (`BPF_F_…` of BPF_PROG_LOAD in linux/bpf.h).
///
/// # Errors
/// See [`load`]; also if the kernel does not accept the name.
pub fn load_named(
    name: &str,
    kind: u32,
    code: &[[u8; 8]],
    license: &CStr,
    flags: u32,
) -> io::Result<OwnedFd> {
    let mut attributes = Load {
        kind,
        instructions: u32::try_from(code.len()).map_err(io::Error::other)?,
        code: code.as_ptr() as u64,
        license: license.as_ptr() as u64,
        log: [0; 2],
        kernel_version: 0,
        flags,
        name: [0; PROGRAM_NAME],
    };
    attributes
        .name
        .get_mut(..name.len())
        .ok_or(io::ErrorKind::InvalidInput)?
        .copy_from_slice(name.as_bytes());
    // SAFETY: the code and license outlive the call.
    unsafe { make(command::PROG_LOAD, &mut attributes) }
}

/// Returns a loaded program by its number.
pub fn program(id: u32) -> io::Result<OwnedFd> {
    // Only the number is read; the two fields of `union bpf_attr` after it, `next_id` and
    // `open_flags`, are 0.
    let mut attributes = [id, 0, 0];
    // SAFETY: the attributes are a number and zeros.
    unsafe { make(command::PROG_GET_FD_BY_ID, &mut attributes) }
}

/// Makes an iterator program walk a map; aya 0.14 cannot specify which one.
///
/// # Errors
/// The program reads or writes more than an element has, or is not an iterator.
pub fn iterate(program: BorrowedFd<'_>, map: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let map = map.as_raw_fd();
    let mut attributes = Attach {
        program: program.as_raw_fd(),
        target: 0,
        kind: ITERATOR,
        flags: 0,
        what: (&raw const map) as u64,
        what_length: size_of_val(&map) as u32,
        zero: 0,
    };
    // SAFETY: the descriptors are open, and the map's descriptor number outlives the call.
    unsafe { make(command::LINK_CREATE, &mut attributes) }
}

/// Starts a walk of such an iterator from the beginning: a file whose reads run the program.
pub fn walk(iterator: BorrowedFd<'_>) -> io::Result<File> {
    // SAFETY: the descriptor is open.
    unsafe { make(command::ITER_CREATE, &mut Read { link: iterator.as_raw_fd(), flags: 0 }) }.map(File::from)
}

/// Detaches a pinned link at once, if its kind supports that.
pub fn detach_link(pin: &Path) {
    let Ok(link) = open(pin, false) else { return };
    // SAFETY: the attributes are one descriptor. A link whose device is gone refuses, and need not
    // be detached.
    let _ = unsafe { call(command::LINK_DETACH, &mut link.as_raw_fd()) };
}

/// Replaces the program of a pinned link in one step: each event runs either the old one or the new
/// one. aya 0.14 supports this for devices only.
///
/// # Errors
/// The pin is not a link, or its target is gone.
pub fn update_link(pin: &Path, program: BorrowedFd<'_>) -> io::Result<()> {
    let link = open(pin, false)?;
    let mut attributes =
        Update { link: link.as_raw_fd(), program: program.as_raw_fd(), flags: 0, old_program: 0 };
    // SAFETY: the descriptors are open.
    unsafe { call(command::LINK_UPDATE, &mut attributes) }.map(drop)
}
