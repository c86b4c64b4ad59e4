//! The MAC addresses of the other nodes that take part in direct forwarding.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Instant,
};

use anyhow::{Context, Result};
use aya::{
    Ebpf,
    maps::{HashMap, MapData},
};
use traffic_policy_ebpf::abi::{MAC_TAKES, mac_key};

use super::{
    super::maps::{size, take},
    gone::Gone,
};

const NAME: &str = "tp_direct_macs";

/// The map, and what it holds.
pub(super) struct Macs {
    map: HashMap<MapData, u64, u32>,
    /// The elements as they are in the map; `None`: not read yet.
    held: Option<BTreeMap<u64, u32>>,
    /// Those of nodes that have no Lease any more: they take nothing, but may send.
    gone: Gone<u64>,
    /// The number of elements that fit.
    room: usize,
}

impl Macs {
    pub(super) fn open(object: &mut Ebpf) -> Result<Self> {
        let room = size(object, NAME)? as usize;
        Ok(Self { map: take(object, NAME)?, held: None, gone: Gone::default(), room })
    }

    /// The number of addresses for which there is room.
    pub(super) fn room(&self) -> u32 {
        u32::try_from(self.room).unwrap_or(u32::MAX)
    }

    /// The number of addresses in the map, 0 before it was read.
    pub(super) fn len(&self) -> usize {
        self.held.as_ref().map_or(0, BTreeMap::len)
    }

    /// Makes the map equal to what is wanted: by each address, whether its node takes packets that
    /// are sent to it as they are. Returns the number of elements written.
    pub(super) fn sync(&mut self, wanted: &BTreeMap<[u8; 6], bool>, all: bool) -> Result<usize> {
        let mut held = match self.held.take() {
            Some(held) if !all => held,
            _ => {
                self.map.iter().collect::<Result<_, _>>().with_context(|| format!("reading {NAME} failed"))?
            }
        };
        let mut wanted: BTreeMap<_, _> =
            wanted.iter().map(|(mac, takes)| (mac_key(*mac), if *takes { MAC_TAKES } else { 0 })).collect();
        let keys: BTreeSet<_> = wanted.keys().copied().collect();
        let over = self.gone.over(held.keys().copied(), &keys, self.room, Instant::now());
        let mut written = self.remove(over, &mut held)?;
        wanted.extend(held.keys().filter(|key| !keys.contains(key)).map(|key| (*key, 0)));
        for (key, flags) in wanted {
            if held.get(&key) != Some(&flags) {
                let inserted = self.map.insert(key, flags, 0);
                inserted.context("naming a node's MAC address failed (is the map full?)")?;
                held.insert(key, flags);
                written += 1;
            }
        }
        self.held = Some(held);
        Ok(written)
    }

    pub(super) fn forget_nodes(&mut self, now: Instant) -> Result<()> {
        let over = self.gone.expire(now);
        // Without `held`, the next sync reads the map, and finds them there.
        if let Some(mut held) = self.held.take_if(|_| !over.is_empty()) {
            self.remove(over, &mut held)?;
            self.held = Some(held);
        }
        Ok(())
    }

    fn remove(&mut self, over: Vec<u64>, held: &mut BTreeMap<u64, u32>) -> Result<usize> {
        let count = over.len();
        for key in over {
            self.map.remove(&key).context("forgetting a node's MAC address failed")?;
            held.remove(&key);
            self.gone.forget(key);
        }
        Ok(count)
    }
}
