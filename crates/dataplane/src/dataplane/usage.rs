//! The figures of the packet path: the usage of its maps, from counters, without reading the maps,
//! and the packets that were refused for want of a program.

use std::time::SystemTime;

use anyhow::Result;
use traffic_policy_cluster::model::ServicePortKey;
use traffic_policy_ebpf::{abi::HOPS_PER_GENERATION, outcome::Outcome};

use super::{
    Dataplane, clock, counters,
    devices::DevicePrograms,
    maps::mmap::{config, routes, used_hops},
    sweep::sweeper::Found,
};

/// The figures of the packet path.
pub trait Figures {
    /// Returns the usage of the maps, for which only a few words of them are read.
    fn usage(&self) -> DataplaneUsage;

    /// Returns the number of packets that were refused because an endpoint of another node is
    /// behind a device without programs.
    fn refused_unattached(&self) -> Result<u64>;
}

/// The usage of one map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MapUsage {
    pub map: &'static str,
    /// Whether the map is for IPv6; `None` if it is for both families.
    pub ipv6: Option<bool>,
    pub used: u64,
    pub size: u32,
}

/// The usage of all maps, and the figures of the last sweep and the planner.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DataplaneUsage {
    pub maps: Vec<MapUsage>,
    /// The result of the last sweep: IPv4, IPv6.
    pub found: [Found; 2],
    /// The episodes in which the flow table had no room for a flow: IPv4, IPv6.
    pub full: [u64; 2],
    /// The number of ports that may be used as source towards endpoints.
    pub snat_ports: u32,
    /// The Service ports that still forward new flows although they are Local and have no endpoint
    /// here, and the time at which that stops.
    pub draining: Vec<(ServicePortKey, SystemTime)>,
}

impl Figures for Dataplane {
    fn usage(&self) -> DataplaneUsage {
        let Self { maps, planner, sweeps, .. } = self;
        let usage = planner.usage();
        let (room, direct) = (&maps.room, self.direct.nodes());
        let mut entries = Vec::new();
        for (family, found) in sweeps.found().iter().enumerate() {
            let ipv6 = family == 1;
            entries.extend(
                [
                    ("flows", u64::from(found.entries), [maps.v4.size, maps.v6.size][family]),
                    ("unassured", u64::from(found.unassured), room.unassured[family]),
                    ("frontends", usage.frontends[family], room.frontends[family]),
                    ("slots", usage.slots[family], room.slots[family]),
                    ("source-ranges", usage.source_ranges[family], room.source_ranges[family]),
                    ("direct-nodes", direct[family] as u64, self.direct.room()[0]),
                ]
                .map(|(map, used, size)| MapUsage { map, ipv6: Some(ipv6), used, size }),
            );
        }
        let generation = maps.prefilter.load(routes::route) >> 16 & 1;
        entries.extend(
            [
                ("services", usage.services, room.services),
                ("maglev", usage.tables, room.tables),
                ("hops", maps.usage.load(used_hops(generation)), HOPS_PER_GENERATION),
                ("devices", self.attached().count() as u64, room.devices),
                ("direct-macs", self.direct.macs() as u64, self.direct.room()[1]),
                ("removed-endpoints", sweeps.removed().len() as u64, room.removed),
            ]
            .map(|(map, used, size)| MapUsage { map, ipv6: None, used, size }),
        );
        // Without a clock, nothing can be draining.
        let monotonic = clock::monotonic().unwrap_or(u64::MAX);
        let now = SystemTime::now();
        let draining = planner.draining(monotonic);
        DataplaneUsage {
            maps: entries,
            found: sweeps.found(),
            full: sweeps.episodes(),
            snat_ports: maps.config.load(config::snat_port_count),
            draining: draining.into_iter().map(|(key, left)| (key, now + left)).collect(),
        }
    }

    fn refused_unattached(&self) -> Result<u64> {
        let counters = counters::all(&self.maps.counters)?;
        let refused = counters.iter().filter(|(_, outcome, _)| *outcome == Outcome::DroppedUnattachedDevice);
        Ok(refused.map(|(_, _, packets)| packets).sum())
    }
}
