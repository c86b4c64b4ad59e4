//! A reader of pinned maps, with many entries per system call: aya 0.14 has no batch operations,
//! and one call per entry takes a second for a full flow table.

use std::{
    ops::Range,
    os::fd::{AsRawFd, OwnedFd},
    path::Path,
};

use anyhow::{Context, Result, ensure};
pub use aya::Pod;
use aya::maps::MapType;

use crate::dataplane::sys::{self, Batch, Element, command};

/// The number of entries that one call reads: more would delay packets that change the same
/// buckets.
const BATCH: u32 = 4096;

/// A pinned map, opened for reading.
#[derive(Debug)]
pub struct Reader {
    name: String,
    fd: OwnedFd,
    info: MapInfo,
}

/// The first fields of `struct bpf_map_info`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct MapInfo {
    /// The map's type, see `enum bpf_map_type`.
    pub kind: u32,
    pub id: u32,
    pub key: u32,
    pub value: u32,
    pub entries: u32,
    pub flags: u32,
}

// SAFETY: it consists of numbers; any bytes are a valid value, and the kernel leaves no gaps.
unsafe impl Pod for MapInfo {}

impl Reader {
    /// Opens the map that is pinned in `folder` under this name.
    pub fn open(folder: &Path, name: &str) -> Result<Self> {
        let path = folder.join(name);
        let fd = sys::open(&path, true).with_context(|| format!("{} cannot be opened", path.display()))?;
        let info = sys::info(&fd).with_context(|| format!("{} is not understood", path.display()))?;
        Ok(Self { name: name.to_owned(), fd, info })
    }

    pub fn info(&self) -> MapInfo {
        self.info
    }

    /// Whether the map is a hash or trie, which may be partly filled; an array is always full.
    pub fn is_hashed(&self) -> bool {
        let kinds = [MapType::Hash, MapType::LruHash, MapType::LpmTrie];
        kinds.iter().any(|kind| *kind as u32 == self.info.kind)
    }

    /// Returns the number of bytes that the kernel charges for the map.
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

    /// Returns the bytes of an element of an array, whatever its layout.
    pub fn bytes_of(&self, index: u32) -> Result<Vec<u8>> {
        let mut bytes = vec![0_u8; (self.info.value as usize).next_multiple_of(8)];
        let mut attributes = Element {
            fd: self.fd.as_raw_fd().cast_unsigned(),
            key: (&raw const index) as u64,
            value: bytes.as_mut_ptr() as u64,
            ..Element::default()
        };
        ensure!(self.info.key == 4, "{} is no array", self.name);
        // SAFETY: the index is the key of an array, and there is room for a value.
        unsafe { sys::call(command::MAP_LOOKUP, &mut attributes) }
            .with_context(|| format!("element {index} of {} cannot be read", self.name))?;
        Ok(bytes)
    }

    /// Returns an element of an array.
    pub fn value<V: Pod>(&self, index: u32) -> Result<V> {
        self.fits::<V>(self.info.value, "values")?;
        let mut bytes = vec![0_u8; size_of::<V>()];
        let mut attributes = Element {
            fd: self.fd.as_raw_fd().cast_unsigned(),
            key: (&raw const index) as u64,
            value: bytes.as_mut_ptr() as u64,
            ..Element::default()
        };
        // SAFETY: the index is the key of an array, and there is room for a value.
        unsafe { sys::call(command::MAP_LOOKUP, &mut attributes) }
            .with_context(|| format!("element {index} of {} cannot be read", self.name))?;
        // SAFETY: there are as many bytes as the value has, and any bytes are a valid value.
        Ok(unsafe { bytes.as_ptr().cast::<V>().read_unaligned() })
    }

    /// Returns all entries of a hash or trie. Entries that are added or removed in the meantime may
    /// or may not be included.
    pub fn entries<K: Pod, V: Pod>(&self) -> Result<Vec<(K, V)>> {
        let mut entries = Vec::new();
        self.each(|key, value| entries.push((key, value)))?;
        Ok(entries)
    }

    /// Calls `visit` with each entry: see [`Self::entries`].
    pub fn each<K: Pod, V: Pod>(&self, mut visit: impl FnMut(K, V)) -> Result<()> {
        self.fits::<K>(self.info.key, "keys")?;
        self.fits::<V>(self.info.value, "values")?;
        self.batches(|keys, values| {
            for (key, value) in keys.chunks_exact(size_of::<K>()).zip(values.chunks_exact(size_of::<V>())) {
                // SAFETY: there are as many bytes as key and value have, and any bytes are valid
                // ones.
                unsafe {
                    visit(
                        key.as_ptr().cast::<K>().read_unaligned(),
                        value.as_ptr().cast::<V>().read_unaligned(),
                    );
                }
            }
        })
    }

    /// Calls `visit` with these elements of an array.
    pub fn elements<V: Pod>(&self, places: Range<u32>, mut visit: impl FnMut(V)) -> Result<()> {
        self.fits::<V>(self.info.value, "values")?;
        ensure!(self.info.kind == MapType::Array as u32, "{} is no array", self.name);
        self.batches_within(places.start..places.end.min(self.info.entries), |_, values| {
            for value in values.chunks_exact(size_of::<V>()) {
                // SAFETY: there are as many bytes as a value has, and any bytes are a valid one.
                visit(unsafe { value.as_ptr().cast::<V>().read_unaligned() });
            }
        })
    }

    /// Returns all keys of a hash, whatever its values.
    pub fn keys<K: Pod>(&self) -> Result<Vec<K>> {
        self.fits::<K>(self.info.key, "keys")?;
        let mut found = Vec::new();
        self.batches(|keys, _| {
            // SAFETY: there are as many bytes as a key has, and any bytes are a valid key.
            let read = |key: &[u8]| unsafe { key.as_ptr().cast::<K>().read_unaligned() };
            found.extend(keys.chunks_exact(size_of::<K>()).map(read));
        })?;
        Ok(found)
    }

    /// Returns the number of entries: of a flow table without its milestones, whose protocol, at
    /// the end of the key, is 0.
    pub fn count(&self) -> Result<u64> {
        let (mut count, key) = (0, self.info.key as usize);
        let has_milestones = self.name.starts_with("tp_flows");
        let counts = |key: &&[u8]| !(has_milestones && key.ends_with(&[0; 4]));
        self.batches(|keys, _| count += keys.chunks_exact(key).filter(counts).count() as u64)?;
        Ok(count)
    }

    fn batches(&self, visit: impl FnMut(&[u8], &[u8])) -> Result<()> {
        self.batches_within(0..u32::MAX, visit)
    }

    /// Reads these elements of an array. Of other maps, whose entries have no order, `within` has
    /// all numbers.
    fn batches_within(&self, within: Range<u32>, mut visit: impl FnMut(&[u8], &[u8])) -> Result<()> {
        let (key, value) = (self.info.key as usize, self.info.value as usize);
        let mut room = BATCH.min(self.info.entries.max(1));
        // The position to continue from is a key or a bucket's number. In an array, it is the index
        // before the next element.
        let mut places = [vec![0_u8; key.max(8)], vec![0_u8; key.max(8)]];
        let mut first = within.start == 0;
        places[0][..4].copy_from_slice(&within.start.wrapping_sub(1).to_ne_bytes());
        let mut left = within.end.saturating_sub(within.start);
        while left > 0 {
            room = room.min(left);
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
            // SAFETY: there is room for the given number of keys and values, and for a position.
            let last = match unsafe { sys::call(command::MAP_LOOKUP_BATCH, &mut batch) } {
                Ok(_) => false,
                // The kernel reports the end of the map with this error.
                Err(error) if error.raw_os_error() == Some(libc::ENOENT) => true,
                // One bucket holds more entries than fit.
                Err(error) if error.raw_os_error() == Some(libc::ENOSPC) => {
                    room *= 2;
                    continue;
                }
                Err(error) => return Err(error).with_context(|| format!("{} cannot be read", self.name)),
            };
            let count = batch.count as usize;
            visit(&keys[..count * key], &values[..count * value]);
            if last {
                break;
            }
            left = left.saturating_sub(batch.count);
            places.swap(0, 1);
            first = false;
        }
        Ok(())
    }
}
