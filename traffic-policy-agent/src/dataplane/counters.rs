//! How many packets left the packet path in which way.

use std::path::Path;

use anyhow::{Context as _, Result};
use aya::maps::{Map, MapData, PerCpuArray};
use traffic_policy_ebpf::{
    abi::hook,
    outcome::{OUTCOMES, Outcome},
};

use super::pins;

/// Hook, outcome, packets.
pub type Counter = (&'static str, Outcome, u64);

pub(super) fn counters(map: &PerCpuArray<MapData, u64>) -> Result<Vec<Counter>> {
    let hooks =
        [(hook::XDP, "xdp"), (hook::INGRESS, "ingress"), (hook::EGRESS, "egress"), (hook::SOCKET, "socket")];
    let mut counters = Vec::new();
    for (number, name) in hooks {
        for outcome in Outcome::ALL {
            let values =
                map.get(&(number * OUTCOMES + *outcome as u32), 0).context("reading the counters failed")?;
            let sum = values.iter().sum();
            if sum > 0 {
                counters.push((name, *outcome, sum));
            }
        }
    }
    Ok(counters)
}

/// The counters of the packet path pinned below `root`, whether or not an agent runs.
///
/// # Errors
/// Nothing of this version is pinned there.
pub fn pinned_counters(root: &Path) -> Result<Vec<Counter>> {
    let path = pins::maps_below(root).join("COUNTERS");
    let data = MapData::from_pin(&path).with_context(|| {
        format!("no packet path of this version is pinned in {}: is --pin-dir right?", root.display())
    })?;
    counters(&PerCpuArray::try_from(Map::PerCpuArray(data)).context("COUNTERS has another type")?)
}
