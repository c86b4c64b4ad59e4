//! How many packets left the packet path in which way.

use std::path::Path;

use anyhow::{Context as _, Result};
use aya::maps::{Map, MapData, PerCpuArray};
use traffic_policy_ebpf::{
    abi::{Counters, hook},
    outcome::Outcome,
};

use super::pins;

/// Hook, outcome, packets.
pub type Counter = (&'static str, Outcome, u64);

/// Every counter of every hook, also those that are zero.
pub(super) fn all(map: &PerCpuArray<MapData, Counters>) -> Result<Vec<Counter>> {
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

/// The counters, except zeros, of the packet path pinned below `root`, whether or not an agent runs.
///
/// # Errors
/// Nothing of this version is pinned there.
pub fn pinned_counters(root: &Path) -> Result<Vec<Counter>> {
    let path = pins::maps_below(root).join("COUNTERS");
    let data = MapData::from_pin(&path).with_context(|| {
        format!("no packet path of this version is pinned in {}: is --pin-dir right?", root.display())
    })?;
    let map = PerCpuArray::try_from(Map::PerCpuArray(data)).context("COUNTERS has another type")?;
    Ok(all(&map)?.into_iter().filter(|(.., packets)| *packets > 0).collect())
}
