//! What pinned maps hold, byte by byte, read past the agent's own code: so that a test can tell that nothing changed.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use nix::libc;

const LOOKUP_BATCH: libc::c_long = 24;
const OBJECT_GET: libc::c_long = 7;
const INFO_BY_FD: libc::c_long = 15;
const HASH: u32 = 1;
const ARRAY: u32 = 2;

/// Every entry of a map: key, value. Elements of an array that are all zero are left out.
pub type Entries = BTreeMap<Vec<u8>, Vec<u8>>;

/// The plain hashes and arrays below an agent's `--pin-dir`, by name. The agent is their writer, but for those that the
/// packet path fills.
pub fn maps(pin_dir: &Path) -> Result<BTreeMap<String, Entries>> {
    let mut maps = BTreeMap::new();
    for path in pins(pin_dir)? {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let map = open(&path).with_context(|| format!("opening {}", path.display()))?;
        let info = info(&map).with_context(|| format!("asking about {name}"))?;
        if info.kind == HASH || info.kind == ARRAY {
            maps.insert(name.clone(), read(&map, &info).with_context(|| format!("reading {name}"))?);
        }
    }
    ensure!(!maps.is_empty(), "no maps below {}", pin_dir.display());
    Ok(maps)
}

fn pins(pin_dir: &Path) -> Result<Vec<PathBuf>> {
    let mut pins = Vec::new();
    for version in fs::read_dir(pin_dir)? {
        for pin in fs::read_dir(version?.path().join("maps"))? {
            pins.push(pin?.path());
        }
    }
    Ok(pins)
}

/// The beginning of the kernel's `struct bpf_map_info`.
#[repr(C)]
#[derive(Default)]
struct Info {
    kind: u32,
    id: u32,
    key: u32,
    value: u32,
    entries: u32,
    flags: u32,
}

/// `union bpf_attr`, as far as one of these commands reads it.
#[repr(C)]
#[derive(Default)]
struct ObjectGet {
    path: u64,
    fd: u32,
    flags: u32,
}

#[repr(C)]
#[derive(Default)]
struct InfoByFd {
    fd: u32,
    length: u32,
    info: u64,
}

#[repr(C)]
#[derive(Default)]
struct Batch {
    from: u64,
    to: u64,
    keys: u64,
    values: u64,
    count: u32,
    fd: u32,
    element_flags: u64,
    flags: u64,
}

fn bpf<T>(command: libc::c_long, attributes: &mut T) -> io::Result<i32> {
    // SAFETY: the attributes are as long as said, and whatever they point to outlives the call.
    let result =
        unsafe { libc::syscall(libc::SYS_bpf, command, std::ptr::from_mut(attributes), size_of::<T>()) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result as i32) }
}

fn open(path: &Path) -> Result<OwnedFd> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    let fd = bpf(OBJECT_GET, &mut ObjectGet { path: path.as_ptr() as u64, ..ObjectGet::default() })?;
    // SAFETY: the call has returned a new descriptor, which nothing else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn info(map: &OwnedFd) -> Result<Info> {
    let mut info = Info::default();
    let (fd, length) = (u32::try_from(map.as_raw_fd())?, u32::try_from(size_of::<Info>())?);
    bpf(INFO_BY_FD, &mut InfoByFd { fd, length, info: (&raw mut info) as u64 })?;
    Ok(info)
}

fn read(map: &OwnedFd, info: &Info) -> Result<Entries> {
    let (key, value) = (info.key as usize, info.value as usize);
    let room = info.entries as usize;
    let (mut keys, mut values) = (vec![0_u8; key * room], vec![0_u8; value * room]);
    // Large enough for all: one call reads the map. The place to go on from is a key or a bucket's number.
    let mut place = vec![0_u8; key.max(8)];
    let mut batch = Batch {
        to: place.as_mut_ptr() as u64,
        keys: keys.as_mut_ptr() as u64,
        values: values.as_mut_ptr() as u64,
        count: info.entries,
        fd: u32::try_from(map.as_raw_fd())?,
        ..Batch::default()
    };
    match bpf(LOOKUP_BATCH, &mut batch) {
        // This is how the kernel says that nothing is left.
        Err(error) if error.raw_os_error() != Some(libc::ENOENT) => return Err(error.into()),
        _ => {}
    }
    // One comparison of slices an element: a loop over bytes takes seconds in a debug build.
    let nothing = vec![0; value];
    let pairs = keys.chunks_exact(key).zip(values.chunks_exact(value)).take(batch.count as usize);
    let pairs = pairs.filter(|(_, value)| info.kind != ARRAY || *value != nothing.as_slice());
    Ok(pairs.map(|(key, value)| (key.to_vec(), value.to_vec())).collect())
}
