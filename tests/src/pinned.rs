//! What pinned maps hold, byte by byte, read past the agent's own code: so that a test can tell that nothing changed.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::ptr;

use anyhow::{Context, Result, bail, ensure};
use nix::libc;

const LOOKUP_BATCH: libc::c_long = 24;
const LOOKUP_AND_DELETE_BATCH: libc::c_long = 25;
const OBJECT_GET: libc::c_long = 7;
const INFO_BY_FD: libc::c_long = 15;
const LOOKUP: libc::c_long = 1;
// linux/bpf.h, enum bpf_map_type
const HASH: u32 = 1;
const ARRAY: u32 = 2;
const PROGRAM_ARRAY: u32 = 3;
const PER_CPU_ARRAY: u32 = 6;
const LRU_HASH: u32 = 9;
const PREFIX_TRIE: u32 = 11;
const RING_BUFFER: u32 = 27;

/// Every entry of a map: key, value. Elements of an array that are all zero are left out.
pub type Entries = BTreeMap<Vec<u8>, Vec<u8>>;

/// The plain hashes and arrays below an agent's `--pin-dir`, by name. The agent is their writer, but for those that the
/// packet path fills.
pub fn maps(pin_dir: &Path) -> Result<BTreeMap<String, Entries>> {
    those(pin_dir, |kind| kind == HASH || kind == ARRAY)
}

/// All maps below an agent's `--pin-dir`, by name. A ring buffer has one entry without key: how far it was written. An array
/// of programs has their numbers.
pub fn all(pin_dir: &Path) -> Result<BTreeMap<String, Entries>> {
    those(pin_dir, |_| true)
}

/// Where the map of a name is pinned below an agent's `--pin-dir`.
pub fn path(pin_dir: &Path, name: &str) -> Result<PathBuf> {
    let found = pins(pin_dir)?.into_iter().find(|pin| pin.file_name().is_some_and(|found| found == name));
    found.with_context(|| format!("no map {name} below {}", pin_dir.display()))
}

/// Takes everything out of a pinned hash.
pub fn empty(pin: &Path) -> Result<()> {
    let map = open(pin).with_context(|| format!("opening {}", pin.display()))?;
    take_all(&map, &info(&map)?, LOOKUP_AND_DELETE_BATCH).map(drop)
}

fn those(pin_dir: &Path, wanted: impl Fn(u32) -> bool) -> Result<BTreeMap<String, Entries>> {
    let mut maps = BTreeMap::new();
    for path in pins(pin_dir)? {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let map = open(&path).with_context(|| format!("opening {}", path.display()))?;
        let info = info(&map).with_context(|| format!("asking about {name}"))?;
        if !wanted(info.kind) {
            continue;
        }
        let entries = match info.kind {
            HASH | ARRAY | PER_CPU_ARRAY | LRU_HASH | PREFIX_TRIE => read(&map, &info),
            PROGRAM_ARRAY => programs(&map, &info),
            RING_BUFFER => written(&map),
            other => bail!("{name} is of a type that is not known here: {other}"),
        };
        maps.insert(name.clone(), entries.with_context(|| format!("reading {name}"))?);
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
struct Element {
    fd: u32,
    zero: u32,
    key: u64,
    value: u64,
    flags: u64,
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
    let result = unsafe { libc::syscall(libc::SYS_bpf, command, ptr::from_mut(attributes), size_of::<T>()) };
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

/// Such arrays are not read in batches.
fn programs(map: &OwnedFd, info: &Info) -> Result<Entries> {
    let mut entries = Entries::new();
    for index in 0..info.entries {
        let mut number = 0_u32;
        let (key, value) = (&raw const index as u64, &raw mut number as u64);
        let fd = u32::try_from(map.as_raw_fd())?;
        match bpf(LOOKUP, &mut Element { fd, key, value, ..Element::default() }) {
            Ok(_) => drop(entries.insert(index.to_ne_bytes().to_vec(), number.to_ne_bytes().to_vec())),
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(entries)
}

/// The producer's position, which is on the second page.
fn written(map: &OwnedFd) -> Result<Entries> {
    // SAFETY: the mapping is of one page that the kernel lends for reading, and is gone before the descriptor is.
    let position = unsafe {
        let page = libc::sysconf(libc::_SC_PAGESIZE);
        let length = usize::try_from(page)?;
        let at =
            libc::mmap(ptr::null_mut(), length, libc::PROT_READ, libc::MAP_SHARED, map.as_raw_fd(), page);
        ensure!(at != libc::MAP_FAILED, io::Error::last_os_error());
        let position = at.cast::<u64>().read_volatile();
        libc::munmap(at, length);
        position
    };
    Ok(Entries::from([(Vec::new(), position.to_ne_bytes().to_vec())]))
}

fn possible_cpus() -> Result<usize> {
    // `0-3`, or `0`.
    let text = fs::read_to_string("/sys/devices/system/cpu/possible")?;
    let last = text.trim().rsplit(['-', ',']).next().unwrap_or_default();
    Ok(last.parse::<usize>().with_context(|| format!("possible CPUs: {text}"))? + 1)
}

fn read(map: &OwnedFd, info: &Info) -> Result<Entries> {
    take_all(map, info, LOOKUP_BATCH)
}

/// All entries by one of the commands that read a batch.
fn take_all(map: &OwnedFd, info: &Info, command: libc::c_long) -> Result<Entries> {
    let key = info.key as usize;
    let value = match info.kind {
        // One value after the other, each padded to eight bytes.
        PER_CPU_ARRAY => (info.value as usize).next_multiple_of(8) * possible_cpus()?,
        _ => info.value as usize,
    };
    let is_array = info.kind == ARRAY || info.kind == PER_CPU_ARRAY;
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
    match bpf(command, &mut batch) {
        // This is how the kernel says that nothing is left.
        Err(error) if error.raw_os_error() != Some(libc::ENOENT) => return Err(error.into()),
        _ => {}
    }
    // One comparison of slices an element: a loop over bytes takes seconds in a debug build.
    let nothing = vec![0; value];
    let pairs = keys.chunks_exact(key).zip(values.chunks_exact(value)).take(batch.count as usize);
    let pairs = pairs.filter(|(_, value)| !is_array || *value != nothing.as_slice());
    Ok(pairs.map(|(key, value)| (key.to_vec(), value.to_vec())).collect())
}
