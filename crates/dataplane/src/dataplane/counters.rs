//! The packet path's counters, by hook and outcome.

use std::path::Path;

use anyhow::{Context as _, Result};
use aya::maps::{Map, MapData, PerCpuArray};
use traffic_policy_ebpf::{
    abi::{OutcomeCounters, hook},
    outcome::Outcome,
};

use super::Dataplane;

/// The hook, the outcome, and the number of packets.
pub type Counter = (&'static str, Outcome, u64);

/// Returns every counter of every hook, including those that are zero.
pub(super) fn all(map: &PerCpuArray<MapData, OutcomeCounters>) -> Result<Vec<Counter>> {
    let hooks = [
        (hook::XDP, "xdp"),
        (hook::INGRESS, "tc-ingress"),
        (hook::EGRESS, "tc-egress"),
        (hook::SOCKET, "socket"),
    ];
    let mut counters = Vec::new();
    for (number, name) in hooks {
        let values = map.get(&number, 0).context("reading the counters failed")?;
        for outcome in Outcome::ALL {
            counters.push((name, *outcome, values.iter().map(|cpu| cpu[*outcome as usize]).sum()));
        }
    }
    Ok(counters)
}

impl Dataplane {
    /// Returns a reader of the packet path's counters that may be called at any time and from any
    /// thread. Counters that are zero are included, so that the first packet of a kind is seen as
    /// growth.
    pub fn counter_reader(&self) -> impl Fn() -> Result<Vec<Counter>> + Send + Sync + 'static {
        let map = self.maps.counters.clone();
        move || all(&map)
    }
}

/// Returns every counter of a pinned map.
pub fn read_pinned(map: &Path) -> Result<Vec<Counter>> {
    let data = MapData::from_pin(map)?;
    all(&PerCpuArray::try_from(Map::PerCpuArray(data)).context("tp_counters has another type")?)
}
