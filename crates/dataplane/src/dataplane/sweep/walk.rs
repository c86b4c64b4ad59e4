//! A walk over a table that a sweep looks at, piece by piece: by an iterator program, or, where the
//! kernel refuses those, by look-ups.
//!
//! A kernel may refuse programs of tracing, which iterators are to it, and load all others:
//! hardened ones do, with EPERM. The agent then reads keys and runs a program for each, which
//! takes some 20 times as long.

use std::{
    fs::File,
    io::{self, Read},
    mem::offset_of,
    os::fd::{AsFd, AsRawFd, OwnedFd},
};

use anyhow::{Context, Result};
use aya::{
    Ebpf,
    programs::{Iter, ProgramError},
};
use traffic_policy_ebpf::abi::{Address4, Address6, Flow, FlowKey, SocketKey, TranslatedSocket};

use crate::dataplane::{
    bpf::test_run,
    maps::Maps,
    sys::{self, Batch, command},
};

/// The most keys of a piece by look-ups.
const KEYS: u32 = 64;
/// The largest key, in words of eight bytes.
const WORDS: usize = size_of::<SocketKey>() / 8;

/// A table that a sweep walks over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SweptTable {
    /// The flows of a family: 0 is IPv4, 1 is IPv6.
    Flows(usize),
    Sockets,
}

impl SweptTable {
    fn map(self, maps: &Maps) -> &OwnedFd {
        match self {
            Self::Flows(family) => &maps.swept.flows[family],
            Self::Sockets => &maps.swept.sockets,
        }
    }

    /// Returns the size of its keys in bytes, a multiple of eight.
    const fn key(self) -> usize {
        match self {
            Self::Flows(0) => size_of::<FlowKey<Address4>>(),
            Self::Flows(_) => size_of::<FlowKey<Address6>>(),
            Self::Sockets => size_of::<SocketKey>(),
        }
    }

    /// Returns the size of its values in bytes.
    const fn value(self) -> usize {
        match self {
            Self::Flows(0) => size_of::<Flow<Address4>>(),
            Self::Flows(_) => size_of::<Flow<Address6>>(),
            Self::Sockets => size_of::<TranslatedSocket>(),
        }
    }

    /// Returns the iterator, and the program that looks at a single entry.
    const fn programs(self) -> [&'static str; 2] {
        match self {
            Self::Flows(0) => ["tp_gc_flows4", "tp_gc_flow4"],
            Self::Flows(_) => ["tp_gc_flows6", "tp_gc_flow6"],
            Self::Sockets => ["tp_gc_sockets", "tp_gc_socket"],
        }
    }

    /// Whether the sweep has to look at an entry with this key. Of sockets these are the forward
    /// entries alone: their map is LRU, so a look-up would mark any other entry as used, and others
    /// would be evicted in its place.
    fn counts(self, key: &[u8]) -> bool {
        self != Self::Sockets || key[offset_of!(SocketKey, forward)] != 0
    }

    /// Whether it is the key of a [milestone][FlowKey::milestone], whose last word is 0.
    fn is_milestone(self, key: &[u8]) -> bool {
        self != Self::Sockets && key.ends_with(&[0; 4])
    }
}

/// The iterators over the tables.
#[derive(Debug)]
pub struct Walkers(Option<[OwnedFd; 3]>);

impl Walkers {
    const TABLES: [SweptTable; 3] = [SweptTable::Flows(0), SweptTable::Flows(1), SweptTable::Sockets];

    pub fn new(object: &Ebpf, maps: &Maps) -> Result<Self> {
        let mut iterators = Vec::new();
        for table in Self::TABLES {
            let [name, _] = table.programs();
            let program =
                object.program(name).with_context(|| format!("the packet path has no program {name}"))?;
            let program: &Iter = program.try_into()?;
            let program = match program.fd() {
                Err(ProgramError::NotLoaded) => return Ok(Self(None)),
                program => program?,
            };
            let iterator = sys::iterate(program.as_fd(), table.map(maps).as_fd());
            iterators.push(iterator.with_context(|| format!("{name} cannot walk over its table"))?);
        }
        Ok(Self(iterators.try_into().ok()))
    }

    /// Begins a walk over a table.
    ///
    /// # Errors
    /// The kernel has no memory or descriptor for it.
    pub fn begin(&self, table: SweptTable) -> Result<Walk> {
        let Some(iterators) = &self.0 else {
            return Ok(Walk::LookUps { table, from: None, room: 1 });
        };
        let number = Self::TABLES.iter().position(|one| *one == table).unwrap_or_default();
        let walk = sys::walk(iterators[number].as_fd()).context("beginning a walk over a table failed")?;
        Ok(Walk::Iterator(walk))
    }
}

/// A walk between two pieces.
#[derive(Debug)]
pub enum Walk {
    Iterator(File),
    LookUps {
        table: SweptTable,
        /// The bucket from which it goes on; `None`: from the first one.
        from: Option<u64>,
        /// The number of keys of the next piece.
        room: u32,
    },
}

impl Walk {
    /// Continues for one piece; returns whether it has reached the end.
    ///
    /// # Errors
    /// The kernel refuses to run the program or to read the table.
    pub fn piece(&mut self, object: &Ebpf, maps: &Maps) -> Result<bool> {
        match self {
            Self::Iterator(walk) => read(walk).context("sweeping a table failed"),
            Self::LookUps { table, from, room } => {
                let (keys, over) = keys(*table, maps, from, *room).context("reading a table failed")?;
                let keys: Vec<_> = keys.chunks_exact(table.key()).collect();
                // Between milestones of a nearly empty table there is nothing but buckets to pass.
                let paused = keys.iter().any(|key| table.is_milestone(key));
                *room = if paused { 1 } else { (*room * 2).min(KEYS) };
                let [_, program] = table.programs();
                for key in keys.into_iter().filter(|key| table.counts(key)) {
                    let mut words = [0; WORDS];
                    for (word, bytes) in words.iter_mut().zip(key.as_chunks().0) {
                        *word = u64::from_ne_bytes(*bytes);
                    }
                    test_run::raw_tracepoint_with(object, program, &words)?;
                }
                Ok(over)
            }
        }
    }
}

fn read(walk: &mut File) -> io::Result<bool> {
    // The buffer is larger than what the program writes for one piece, and only that write ends a
    // read.
    let mut marks = [0; 64];
    match walk.read(&mut marks) {
        Ok(length) => Ok(length == 0),
        // The last piece of another walk ended with its last element, and so this one ended before
        // its first.
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
        Err(error) => Err(error),
    }
}

/// Reads the next keys, and moves `from` behind them. Returns whether they are the last.
fn keys(
    table: SweptTable,
    maps: &Maps,
    from: &mut Option<u64>,
    mut room: u32,
) -> io::Result<(Vec<u8>, bool)> {
    let map = table.map(maps);
    loop {
        let mut keys = vec![0; table.key() * room as usize];
        let mut values = vec![0_u8; table.value() * room as usize];
        let (start, mut next) = (from.unwrap_or_default(), 0_u64);
        let mut batch = Batch {
            from: if from.is_some() { (&raw const start) as u64 } else { 0 },
            to: (&raw mut next) as u64,
            keys: keys.as_mut_ptr() as u64,
            values: values.as_mut_ptr() as u64,
            count: room,
            fd: map.as_raw_fd().cast_unsigned(),
            ..Batch::default()
        };
        // SAFETY: there is room for this number of keys and values, and for a position.
        let over = match unsafe { sys::call(command::MAP_LOOKUP_BATCH, &mut batch) } {
            Ok(_) => false,
            Err(error) => match error.raw_os_error() {
                // The kernel reports the end of the map with this error.
                Some(libc::ENOENT) => true,
                // One bucket holds more entries than fit.
                Some(libc::ENOSPC) => {
                    room *= 2;
                    continue;
                }
                _ => return Err(error),
            },
        };
        keys.truncate(table.key() * batch.count as usize);
        *from = Some(next);
        return Ok((keys, over));
    }
}
