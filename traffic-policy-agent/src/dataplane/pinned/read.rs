//! Reads pinned maps, many entries by one system call: aya 0.14 has no batch, and one call an entry takes a second for a
//! full flow table.

use std::{
    ffi::CString,
    io,
    os::{
        fd::{AsRawFd, FromRawFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::Path,
};

use anyhow::{Context, Result, ensure};
use aya::Pod;

/// Entries that one call reads: more would hold up packets that change the same buckets.
const BATCH: u32 = 4096;

/// linux/bpf.h: enum bpf_cmd.
mod command {
    pub const LOOKUP: libc::c_int = 1;
    pub const OBJECT_GET: libc::c_int = 7;
    pub const INFO: libc::c_int = 15;
    pub const LOOKUP_BATCH: libc::c_int = 24;
}

/// BPF_F_RDONLY
const READ_ONLY: u32 = 1 << 3;

/// A pinned map, opened for reading.
#[derive(Debug)]
pub struct Reader {
    name: String,
    fd: OwnedFd,
    info: MapInfo,
}

/// The beginning of `struct bpf_map_info`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct MapInfo {
    /// See `enum bpf_map_type`.
    pub kind: u32,
    pub id: u32,
    pub key: u32,
    pub value: u32,
    pub entries: u32,
    pub flags: u32,
}

// The parts of `union bpf_attr` that the commands read.
#[repr(C)]
#[derive(Default)]
struct ObjectGet {
    path: u64,
    fd: u32,
    flags: u32,
}

#[repr(C)]
#[derive(Default)]
struct Info {
    fd: u32,
    length: u32,
    info: u64,
}

#[repr(C)]
#[derive(Default)]
struct Lookup {
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

fn bpf<T>(command: libc::c_int, attributes: &mut T) -> io::Result<libc::c_int> {
    // SAFETY: the attributes are as long as said; whatever they point to is valid for what the command reads and writes,
    // as each caller sees to.
    let result =
        unsafe { libc::syscall(libc::SYS_bpf, command, std::ptr::from_mut(attributes), size_of::<T>()) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result as libc::c_int) }
}

/// Opens a pin: of a map for reading, of a link as it is.
///
/// # Errors
/// There is no such pin, or the kernel refuses.
pub fn open(pin: &Path, read_only: bool) -> io::Result<OwnedFd> {
    let path = CString::new(pin.as_os_str().as_bytes())?;
    let flags = if read_only { READ_ONLY } else { 0 };
    let mut attributes = ObjectGet { path: path.as_ptr() as u64, fd: 0, flags };
    let fd = bpf(command::OBJECT_GET, &mut attributes)?;
    // SAFETY: the kernel has just made this descriptor, and nobody else has it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// What the kernel says of a map or link: the first bytes of its description.
///
/// # Errors
/// The kernel refuses.
pub fn info<T: Default>(fd: &OwnedFd) -> io::Result<T> {
    let mut info = T::default();
    let length = u32::try_from(size_of::<T>()).map_err(io::Error::other)?;
    bpf(
        command::INFO,
        &mut Info { fd: fd.as_raw_fd().cast_unsigned(), length, info: (&raw mut info) as u64 },
    )?;
    Ok(info)
}

impl Reader {
    /// # Errors
    /// The map is not pinned there, or may not be read.
    pub fn open(folder: &Path, name: &str) -> Result<Self> {
        let path = folder.join(name);
        let fd = open(&path, true).with_context(|| format!("{} cannot be opened", path.display()))?;
        let info = info(&fd).with_context(|| format!("{} is not understood", path.display()))?;
        Ok(Self { name: name.to_owned(), fd, info })
    }

    pub fn info(&self) -> MapInfo {
        self.info
    }

    /// Bytes that the kernel charges for the map.
    pub fn bytes(&self) -> Result<u64> {
        let path = format!("/proc/self/fdinfo/{}", self.fd.as_raw_fd());
        let text = std::fs::read_to_string(&path).with_context(|| format!("{path} cannot be read"))?;
        let memory = text.lines().find_map(|line| line.strip_prefix("memlock:"));
        memory.and_then(|bytes| bytes.trim().parse().ok()).with_context(|| format!("{path} names no memory"))
    }

    fn fits<V>(&self, size: u32, what: &str) -> Result<()> {
        ensure!(
            size as usize == size_of::<V>(),
            "{} of {} have {size} bytes, this version expects {}",
            what,
            self.name,
            size_of::<V>()
        );
        Ok(())
    }

    /// An element of an array.
    ///
    /// # Errors
    /// There is no such element.
    pub fn value<V: Pod>(&self, index: u32) -> Result<V> {
        self.fits::<V>(self.info.value, "values")?;
        let mut bytes = vec![0_u8; size_of::<V>()];
        let mut attributes = Lookup {
            fd: self.fd.as_raw_fd().cast_unsigned(),
            key: (&raw const index) as u64,
            value: bytes.as_mut_ptr() as u64,
            ..Lookup::default()
        };
        bpf(command::LOOKUP, &mut attributes)
            .with_context(|| format!("element {index} of {} cannot be read", self.name))?;
        // SAFETY: as many bytes as the value has, and any bytes make one.
        Ok(unsafe { bytes.as_ptr().cast::<V>().read_unaligned() })
    }

    /// All entries of a hash or trie. What is added or removed meanwhile may be missing or there.
    ///
    /// # Errors
    /// The map has another layout, or the kernel refuses.
    pub fn entries<K: Pod, V: Pod>(&self) -> Result<Vec<(K, V)>> {
        let mut entries = Vec::new();
        self.each(|key, value| entries.push((key, value)))?;
        Ok(entries)
    }

    /// Calls `visit` with each entry: see [`Self::entries`].
    ///
    /// # Errors
    /// As there.
    pub fn each<K: Pod, V: Pod>(&self, mut visit: impl FnMut(K, V)) -> Result<()> {
        self.fits::<K>(self.info.key, "keys")?;
        self.fits::<V>(self.info.value, "values")?;
        self.batches(|keys, values| {
            for (key, value) in keys.chunks_exact(size_of::<K>()).zip(values.chunks_exact(size_of::<V>())) {
                // SAFETY: as many bytes as key and value have, and any bytes make one.
                unsafe {
                    visit(
                        key.as_ptr().cast::<K>().read_unaligned(),
                        value.as_ptr().cast::<V>().read_unaligned(),
                    );
                }
            }
        })
    }

    /// Number of entries.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn count(&self) -> Result<u64> {
        let (mut count, key) = (0, self.info.key as usize);
        self.batches(|keys, _| count += (keys.len() / key) as u64)?;
        Ok(count)
    }

    fn batches(&self, mut visit: impl FnMut(&[u8], &[u8])) -> Result<()> {
        let (key, value) = (self.info.key as usize, self.info.value as usize);
        let mut room = BATCH.min(self.info.entries.max(1));
        // The place to go on from is a key or a bucket's number.
        let mut places = [vec![0_u8; key.max(8)], vec![0_u8; key.max(8)]];
        let mut first = true;
        loop {
            let (mut keys, mut values) = (vec![0; key * room as usize], vec![0; value * room as usize]);
            let [from, to] = &mut places;
            let mut batch = Batch {
                from: if first { 0 } else { from.as_ptr() as u64 },
                to: to.as_mut_ptr() as u64,
                keys: keys.as_mut_ptr() as u64,
                values: values.as_mut_ptr() as u64,
                count: room,
                fd: self.fd.as_raw_fd().cast_unsigned(),
                ..Batch::default()
            };
            let last = match bpf(command::LOOKUP_BATCH, &mut batch) {
                Ok(_) => false,
                // This is how the kernel says that nothing is left.
                Err(error) if error.raw_os_error() == Some(libc::ENOENT) => true,
                // One bucket holds more than fits.
                Err(error) if error.raw_os_error() == Some(libc::ENOSPC) => {
                    room *= 2;
                    continue;
                }
                Err(error) => return Err(error).with_context(|| format!("{} cannot be read", self.name)),
            };
            let count = batch.count as usize;
            visit(&keys[..count * key], &values[..count * value]);
            if last {
                return Ok(());
            }
            places.swap(0, 1);
            first = false;
        }
    }
}
