//! BPF maps as raw bytes, read and written by bpf(2) without the agent's own code.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::ptr;

use anyhow::{Context, Result, bail, ensure};
use nix::libc;
use traffic_policy_dataplane::{
    MapInfo,
    sys::{
        self, Batch, Element,
        command::{MAP_LOOKUP, MAP_LOOKUP_BATCH},
    },
};

// linux/bpf.h: enum bpf_cmd, the commands that the agent does not use.
const UPDATE: libc::c_int = 2;
const DELETE: libc::c_int = 3;
const LOOKUP_AND_DELETE_BATCH: libc::c_int = 25;

/// The values of enum bpf_map_type in linux/bpf.h that maps of the packet path have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Hash,
    Array,
    ProgramArray,
    PerCpuArray,
    LruHash,
    PrefixTrie,
    RingBuffer,
}

impl Kind {
    fn of(number: u32) -> Result<Self> {
        Ok(match number {
            1 => Self::Hash,
            2 => Self::Array,
            3 => Self::ProgramArray,
            6 => Self::PerCpuArray,
            9 => Self::LruHash,
            11 => Self::PrefixTrie,
            27 => Self::RingBuffer,
            other => bail!("a map of a type that is not known here: {other}"),
        })
    }

    /// Whether all elements always exist, so that none can be deleted.
    fn is_array(self) -> bool {
        matches!(self, Self::Array | Self::PerCpuArray)
    }
}

/// The entries of a map, value by key. Elements of an array that are all zero are left out.
pub type Entries = BTreeMap<Vec<u8>, Vec<u8>>;

/// An open map.
#[derive(Debug)]
pub struct BpfMap {
    fd: OwnedFd,
    kind: Kind,
    /// Bytes of a key, and of a value as bpf(2) copies it.
    key: usize,
    value: usize,
    entries: u32,
}

impl BpfMap {
    /// Wraps the descriptor of a map.
    pub fn new(fd: OwnedFd) -> Result<Self> {
        let info: MapInfo = sys::info(&fd)?;
        let kind = Kind::of(info.kind)?;
        let value = match kind {
            // The values of all CPUs lie one after the other, each padded to eight bytes.
            Kind::PerCpuArray => (info.value as usize).next_multiple_of(8) * possible_cpus()?,
            _ => info.value as usize,
        };
        Ok(Self { fd, kind, key: info.key as usize, value, entries: info.entries })
    }

    /// Opens a pinned map.
    pub fn pinned(pin: &Path) -> Result<Self> {
        let fd = sys::open(pin, false).with_context(|| format!("opening {}", pin.display()))?;
        Self::new(fd).with_context(|| pin.display().to_string())
    }

    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Reads the content of the map. A ring buffer has one entry without a key: its producer
    /// position. An array of programs holds their ids.
    pub fn read(&self) -> Result<Entries> {
        match self.kind {
            Kind::ProgramArray => self.programs(),
            Kind::RingBuffer => {
                let (_, written) = self.positions(false)?;
                Ok(Entries::from([(Vec::new(), written.to_ne_bytes().to_vec())]))
            }
            _ => self.batch(MAP_LOOKUP_BATCH, self.entries),
        }
    }

    /// Deletes all entries of a hash.
    pub fn empty(&self) -> Result<()> {
        self.batch(LOOKUP_AND_DELETE_BATCH, self.entries).map(drop)
    }

    /// Resets the map to its state when new: a hash is emptied, the first `elements` of an array
    /// are zeroed, the records of a ring buffer count as read. An array of programs keeps them.
    pub fn renew(&self, elements: u32) -> Result<()> {
        match self.kind {
            Kind::ProgramArray => {}
            Kind::RingBuffer => drop(self.positions(true)?),
            kind if kind.is_array() => {
                let zero = vec![0; self.value];
                for key in self.batch(MAP_LOOKUP_BATCH, self.entries.min(elements))?.keys() {
                    self.write(key, &zero)?;
                }
            }
            _ => {
                for key in self.batch(MAP_LOOKUP_BATCH, self.entries)?.keys() {
                    self.element(DELETE, key, 0)?;
                }
            }
        }
        Ok(())
    }

    /// Writes an entry whatever it means to the packet path: the last element below `elements` of
    /// an array, the key of zeros of a hash.
    pub fn scribble(&self, elements: u32) -> Result<()> {
        let key = match self.kind {
            kind if kind.is_array() => (self.entries.min(elements) - 1).to_ne_bytes().to_vec(),
            _ => vec![0; self.key],
        };
        match self.kind {
            Kind::ProgramArray => {
                let taken = self.programs()?.into_keys().next().context("no program is in it")?;
                self.element(DELETE, &taken, 0)
            }
            Kind::RingBuffer => bail!("only programs write records"),
            _ => self.write(&key, &vec![0xff; self.value]),
        }
    }

    /// The number of unread bytes of a ring buffer.
    pub fn unread(&self) -> Result<u64> {
        ensure!(self.kind == Kind::RingBuffer, "not a ring buffer but a map of type {:?}", self.kind);
        let (read, written) = self.positions(false)?;
        Ok(written - read)
    }

    /// Writes one element.
    pub fn write(&self, key: &[u8], value: &[u8]) -> Result<()> {
        ensure!(value.len() == self.value, "a value of {} bytes, not of {}", self.value, value.len());
        self.element(UPDATE, key, value.as_ptr() as u64)
    }

    fn element(&self, command: libc::c_int, key: &[u8], value: u64) -> Result<()> {
        ensure!(key.len() == self.key, "a key of {} bytes, not of {}", self.key, key.len());
        let fd = u32::try_from(self.fd.as_raw_fd())?;
        bpf(command, &mut Element { fd, key: key.as_ptr() as u64, value, ..Element::default() })?;
        Ok(())
    }

    /// Reads an array of programs, which cannot be read in batches.
    fn programs(&self) -> Result<Entries> {
        let mut entries = Entries::new();
        for index in 0..self.entries {
            let mut number = 0_u32;
            let (key, value) = (&raw const index as u64, &raw mut number as u64);
            let fd = u32::try_from(self.fd.as_raw_fd())?;
            match bpf(MAP_LOOKUP, &mut Element { fd, key, value, ..Element::default() }) {
                Ok(_) => drop(entries.insert(index.to_ne_bytes().to_vec(), number.to_ne_bytes().to_vec())),
                Err(error) if error.raw_os_error() == Some(libc::ENOENT) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(entries)
    }

    /// The consumer and producer positions of a ring buffer: the first is on its first page, which
    /// is writable, the second on its second page.
    fn positions(&self, read_all: bool) -> Result<(u64, u64)> {
        // SAFETY: the kernel maps whole pages and enforces which are writable; they are unmapped
        // before the descriptor is closed.
        unsafe {
            let page = libc::sysconf(libc::_SC_PAGESIZE);
            let length = usize::try_from(page)?;
            let map = |protection, offset| {
                let fd = self.fd.as_raw_fd();
                let at = libc::mmap(ptr::null_mut(), length, protection, libc::MAP_SHARED, fd, offset);
                ensure!(at != libc::MAP_FAILED, io::Error::last_os_error());
                Ok(at.cast::<u64>())
            };
            let written = map(libc::PROT_READ, page)?;
            let position = written.read_volatile();
            libc::munmap(written.cast(), length);
            let access = if read_all { libc::PROT_READ | libc::PROT_WRITE } else { libc::PROT_READ };
            let read = map(access, 0)?;
            if read_all {
                read.write_volatile(position);
            }
            let read_position = read.read_volatile();
            libc::munmap(read.cast(), length);
            Ok((read_position, position))
        }
    }

    /// Reads the first `count` entries by one of the batch commands.
    fn batch(&self, command: libc::c_int, count: u32) -> Result<Entries> {
        let room = count as usize;
        let (mut keys, mut values) = (vec![0_u8; self.key * room], vec![0_u8; self.value * room]);
        // One call reads all. The place to continue from is a key or the number of a bucket.
        let mut place = vec![0_u8; self.key.max(8)];
        let mut batch = Batch {
            to: place.as_mut_ptr() as u64,
            keys: keys.as_mut_ptr() as u64,
            values: values.as_mut_ptr() as u64,
            count,
            fd: u32::try_from(self.fd.as_raw_fd())?,
            ..Batch::default()
        };
        match bpf(command, &mut batch) {
            // The kernel reports the end of the map by ENOENT.
            Err(error) if error.raw_os_error() != Some(libc::ENOENT) => return Err(error.into()),
            _ => {}
        }
        // One comparison of slices for each element: a loop over bytes takes seconds in a debug
        // build.
        let nothing = vec![0; self.value];
        let is_array = self.kind.is_array();
        let pairs = keys.chunks_exact(self.key).zip(values.chunks_exact(self.value));
        let pairs = pairs.take(batch.count as usize);
        let pairs = pairs.filter(|(_, value)| !is_array || *value != nothing.as_slice());
        Ok(pairs.map(|(key, value)| (key.to_vec(), value.to_vec())).collect())
    }
}

fn bpf<T>(command: libc::c_int, attributes: &mut T) -> io::Result<i32> {
    // SAFETY: the attributes begin like those of the command, and all that they point to outlives
    // the call.
    unsafe { sys::call(command, attributes) }
}

fn possible_cpus() -> Result<usize> {
    // The file contains `0-3`, or `0`.
    let text = fs::read_to_string("/sys/devices/system/cpu/possible")?;
    let last = text.trim().rsplit(['-', ',']).next().unwrap_or_default();
    Ok(last.parse::<usize>().with_context(|| format!("possible CPUs: {text}"))? + 1)
}
