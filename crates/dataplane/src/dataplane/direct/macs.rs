//! The MAC addresses of the other nodes that take part in direct forwarding.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use aya::{
    Ebpf,
    maps::{HashMap, MapData},
};
use traffic_policy_ebpf::abi::{MAC_TAKES, mac_key};

const NAME: &str = "tp_direct_macs";

/// The map, and what it holds.
pub(super) struct Macs {
    map: HashMap<MapData, u64, u32>,
    /// The elements as they are in the map; `None`: not read yet.
    held: Option<BTreeMap<u64, u32>>,
}

impl Macs {
    pub(super) fn open(object: &mut Ebpf) -> Result<Self> {
        let map = object.take_map(NAME).with_context(|| format!("the packet path has no map {NAME}"))?;
        let map = map.try_into().with_context(|| format!("map {NAME} has another type"))?;
        Ok(Self { map, held: None })
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
        let wanted: BTreeMap<_, _> =
            wanted.iter().map(|(mac, takes)| (mac_key(*mac), if *takes { MAC_TAKES } else { 0 })).collect();
        let mut written = 0;
        let gone: Vec<_> = held.keys().copied().filter(|key| !wanted.contains_key(key)).collect();
        for key in gone {
            self.map.remove(&key).context("forgetting a node's MAC address failed")?;
            held.remove(&key);
            written += 1;
        }
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
}
