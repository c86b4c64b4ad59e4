//! How full the maps are, and what else may be told of the data plane without asking a packet.

use std::time::SystemTime;

use anyhow::Result;
use traffic_policy_ebpf::abi::HOP_ARENA;

use super::{
    Counter, Dataplane, Found, counters, kernel,
    words::{state, used_hops},
};
use crate::model::ServicePortKey;

/// Entries of one map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fill {
    pub map: &'static str,
    /// `None`: for both families.
    pub ipv6: Option<bool>,
    pub used: u64,
    pub size: u32,
}

/// How things stand.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Levels {
    pub maps: Vec<Fill>,
    /// What the last sweep found: IPv4, IPv6.
    pub found: [Found; 2],
    /// Ports that may be used as source towards endpoints.
    pub snat_ports: u32,
    /// Service ports that still forward new flows although they are Local and have no endpoint here: until when.
    pub draining: Vec<(ServicePortKey, SystemTime)>,
}

impl Dataplane {
    /// Looks at what is known already: no map is read but for a few words.
    pub fn levels(&self) -> Levels {
        let usage = self.planner.usage();
        let room = &self.tables.room;
        let mut maps = Vec::new();
        for (family, found) in self.found.iter().enumerate() {
            let ipv6 = family == 1;
            maps.extend(
                [
                    ("flows", u64::from(found.entries), [self.tables.v4.size, self.tables.v6.size][family]),
                    ("pending", u64::from(found.pending), room.pending[family]),
                    ("frontends", usage.frontends[family], room.frontends[family]),
                    ("slots", usage.slots[family], room.slots[family]),
                    ("source-ranges", usage.source_ranges[family], room.source_ranges[family]),
                ]
                .map(|(map, used, size)| Fill { map, ipv6: Some(ipv6), used, size }),
            );
        }
        let arena = self.tables.state.load(state::route) >> 16 & 1;
        maps.extend(
            [
                ("services", usage.services, super::PLAN_SIZES.services),
                ("hops", self.tables.usage.load(used_hops(arena)), HOP_ARENA),
                ("devices", self.attached.len() as u64, room.devices),
                ("gone-endpoints", self.gone.len() as u64, room.gone),
            ]
            .map(|(map, used, size)| Fill { map, ipv6: None, used, size }),
        );
        // Without a clock nothing can be draining.
        let monotonic = kernel::monotonic().unwrap_or(u64::MAX);
        let now = SystemTime::now();
        let draining = self.planner.draining(monotonic);
        Levels {
            maps,
            found: self.found,
            snat_ports: self.tables.state.load(state::pool_len),
            draining: draining.into_iter().map(|(key, left)| (key, now + left)).collect(),
        }
    }

    /// Reads the packet path's counters, at any time and from any thread: with zeros, so that the first packet of a kind is
    /// seen as growth.
    pub fn counter_reader(&self) -> impl Fn() -> Result<Vec<Counter>> + Send + Sync + 'static {
        let map = self.tables.counters.clone();
        move || counters::all(&map)
    }

    /// Whether the next sync compares everything, not just what changed.
    pub fn compares_all(&self) -> bool {
        self.planner.is_first()
    }
}
