//! A mapped array of words, of which the agent has only that part in its memory which it writes or
//! reads at the moment: mapped as a whole it would count as memory of the agent.
//!
//! A Maglev table of the default size has 4,096 words. Written by BPF_MAP_UPDATE_BATCH, for each of
//! which the kernel copies a key and a value, they take 0.8 ms.

use std::{
    num::NonZeroUsize,
    os::fd::AsFd as _,
    ptr::NonNull,
    sync::atomic::{AtomicU64, Ordering, fence},
};

use anyhow::{Context, Result, ensure};
use aya::maps::{Map, MapData};
use nix::{
    libc::off_t,
    sys::mman::{MapFlags, ProtFlags, mmap, munmap},
};

use crate::dataplane::bpf::introspect::page_size;

const WORD: usize = size_of::<u64>();
/// The flag of linux/bpf.h of an array that can be mapped.
const BPF_F_MMAPABLE: u32 = 1 << 10;

/// An mmapable array of 64-bit words.
#[derive(Debug)]
pub struct Words {
    map: MapData,
    len: usize,
}

impl Words {
    /// Takes the map.
    ///
    /// # Errors
    /// It is no array of words, or cannot be mapped.
    pub fn new(map: Map) -> Result<Self> {
        let Map::Array(map) = map else { anyhow::bail!("not an array") };
        let info = map.info().context("the size of an array cannot be read")?;
        ensure!(info.value_size() as usize == WORD, "elements of {} bytes are no words", info.value_size());
        ensure!(
            info.map_flags() & BPF_F_MMAPABLE != 0,
            "the pinned array cannot be mapped: a build before the first release has made it; run `cleanup`, \
             and start again"
        );
        Ok(Self { map, len: info.max_entries() as usize })
    }

    /// Writes consecutive words, the first one at index `first`. Each is stored as a whole; a
    /// program that sees what bpf(2) writes afterwards sees them, too.
    ///
    /// # Errors
    /// The array ends before, or the agent has no memory left to map.
    pub fn write(&mut self, first: u32, words: &[u64]) -> Result<()> {
        let part = self.map_part(first, words.len())?;
        for (place, word) in part.words().iter().zip(words) {
            place.store(*word, Ordering::Relaxed);
        }
        fence(Ordering::Release);
        Ok(())
    }

    /// Reads `count` consecutive words, the first one at index `first`.
    ///
    /// # Errors
    /// The same as those of [`Self::write`].
    pub fn read(&self, first: u32, count: u32) -> Result<Vec<u64>> {
        let part = self.map_part(first, count as usize)?;
        Ok(part.words().iter().map(|word| word.load(Ordering::Relaxed)).collect())
    }

    fn map_part(&self, first: u32, count: usize) -> Result<Mapping> {
        let (first, page) = (first as usize, page_size());
        ensure!(first + count <= self.len, "an array of {} words ends before {}", self.len, first + count);
        let before = first * WORD % page;
        let offset = off_t::try_from(first * WORD - before)?;
        // An empty part takes a page, too.
        let length = NonZeroUsize::new((before + count * WORD).max(1)).context("no length")?;
        let (protection, flags) = (ProtFlags::PROT_READ | ProtFlags::PROT_WRITE, MapFlags::MAP_SHARED);
        // SAFETY: a new mapping at an address that the kernel chooses.
        let address = unsafe { mmap(None, length, protection, flags, self.map.fd().as_fd(), offset) };
        let address = address.context("mapping a part of a map into memory failed")?;
        Ok(Mapping { address: address.cast(), length: length.get(), before: before / WORD, count })
    }
}

/// A part of the array that is mapped.
struct Mapping {
    address: NonNull<u64>,
    length: usize,
    /// The words between the beginning of the page and the part.
    before: usize,
    count: usize,
}

impl Mapping {
    fn words(&self) -> &[AtomicU64] {
        // SAFETY: so many words are mapped as long as `self` lives; programs load whole words, and
        // nobody else stores any.
        unsafe { std::slice::from_raw_parts(self.address.as_ptr().add(self.before).cast(), self.count) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: what `Words::map_part` has mapped; no reference to it is left.
        if let Err(error) = unsafe { munmap(self.address.cast(), self.length) } {
            tracing::warn!("a part of a map stays in memory: {error}");
        }
    }
}
