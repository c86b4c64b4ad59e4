//! The loaded programs with their maps, and the state in which each test finds them.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd};

use anyhow::{Context, Result};
use aya::Ebpf;
use aya::maps::{Array, HashMap, Map, MapData, PerCpuArray};
use traffic_policy_dataplane::{self as dataplane, Kernel, MapSizes, Maps};
use traffic_policy_ebpf::abi::{Affinity, AffinityKey, HOPS, NodeSilence, RejectBucket};

use crate::bpf_map::{BpfMap, Entries, Kind};
use crate::lab::Family;

/// The most elements of an array that are written, from the first on: all next hops, and the slots
/// of as many frontends as any test has.
pub(super) const ELEMENTS: u32 = HOPS;

/// Programs and maps. Verification of the programs takes most of a second, and half a minute on an
/// emulated machine.
pub struct Loaded {
    pub object: Ebpf,
    pub tables: Maps,
    pub(super) buckets: PerCpuArray<MapData, RejectBucket>,
    pub(super) affinity: HashMap<MapData, AffinityKey, Affinity>,
    pub(super) node_silence: Array<MapData, NodeSilence>,
    /// Every map of the object by name, except constants.
    maps: BTreeMap<String, BpfMap>,
}

impl Loaded {
    pub(super) fn load(sizes: MapSizes, seed: u64) -> Result<Self> {
        dataplane::check_privileges()?;
        let mut object = dataplane::load_seeded(sizes, seed, &Kernel::running()?)?;
        dataplane::load_programs(&mut object)?;
        let mut maps = BTreeMap::new();
        for (name, map) in object.maps().filter(|(name, _)| !name.starts_with(".rodata")) {
            let map = descriptor(map)?.try_clone_to_owned().map_err(Into::into).and_then(BpfMap::new);
            maps.insert(name.to_owned(), map.with_context(|| format!("map {name}"))?);
        }
        let tables = Maps::take(&mut object)?;
        let mut take = |name: &str| object.take_map(name).with_context(|| format!("no map {name}"));
        let buckets = take("tp_reject_limit")?.try_into()?;
        let affinity = take("tp_affinity")?.try_into()?;
        let node_silence = take("tp_node_silence")?.try_into()?;
        Ok(Self { object, tables, buckets, affinity, node_silence, maps })
    }

    /// Resets every map to its state when new, and restores the programs to which others jump.
    pub fn renew(&mut self) -> Result<()> {
        for (name, map) in &self.maps {
            map.renew(ELEMENTS).with_context(|| format!("emptying {name}"))?;
        }
        dataplane::jumps(&self.object, &mut self.tables)
    }

    /// The content of every map, by name; ring buffers are empty.
    pub fn content(&self) -> Result<BTreeMap<String, Entries>> {
        let maps = self.maps.iter().filter(|(_, map)| map.kind() != Kind::RingBuffer);
        maps.map(|(name, map)| Ok((name.clone(), map.read().with_context(|| format!("reading {name}"))?)))
            .collect()
    }

    /// Writes an entry into every map that bpf(2) can write.
    pub fn scribble(&self) -> Result<()> {
        let mut maps = self.maps.iter().filter(|(_, map)| map.kind() != Kind::RingBuffer);
        maps.try_for_each(|(name, map)| map.scribble(ELEMENTS).with_context(|| format!("writing {name}")))
    }

    pub(super) fn map(&self, name: &str) -> &BpfMap {
        self.maps.get(name).unwrap_or_else(|| panic!("no map {name}"))
    }

    /// The number of used places in the directory of a family's flows.
    pub fn places(&self, family: Family) -> usize {
        let name = if family == Family::V4 { "tp_flow_dir4" } else { "tp_flow_dir6" };
        let places = self.map(name).read().unwrap_or_else(|error| panic!("reading {name}: {error:#}"));
        // The last field of a tuple is its protocol, which is 0 in a free place.
        places.values().filter(|tuple| !tuple.ends_with(&[0; 4])).count()
    }

    /// The number of unread suspicions.
    pub fn unread_suspicions(&self) -> usize {
        let unread = self.map("tp_suspicions").unread().unwrap_or_else(|error| panic!("{error:#}"));
        // An item has a header of eight bytes.
        unread as usize / (8 + size_of::<traffic_policy_ebpf::abi::Suspicion>())
    }

    /// The number of unread bytes of events.
    pub fn unread_events(&self) -> Result<u64> {
        self.maps.get("tp_events").context("no map tp_events")?.unread()
    }
}

/// Returns the file descriptor of a map of one of the packet path's types.
pub fn descriptor(map: &Map) -> Result<BorrowedFd<'_>> {
    match map {
        Map::Array(map)
        | Map::HashMap(map)
        | Map::LpmTrie(map)
        | Map::LruHashMap(map)
        | Map::PerCpuArray(map)
        | Map::ProgramArray(map)
        | Map::RingBuf(map) => Ok(map.fd().as_fd()),
        other => anyhow::bail!("a map of another type: {other:?}"),
    }
}
