//! Counters of an agent's packet path, read from its pinned map. `status` shows the same, but takes
//! a process.

use std::collections::BTreeMap;
use std::fs;

use anyhow::{Context, Result};
use aya::maps::{Map, MapData, PerCpuArray};
use traffic_policy_ebpf::abi::{self, hook};
use traffic_policy_ebpf::outcome::Outcome;

use crate::agent::Agent;

/// Counters by hook and outcome, with the names of `explain`.
pub type Counted = BTreeMap<(&'static str, &'static str), u64>;

/// The hooks that decide on new flows.
const HOOKS: [(&str, u32); 3] = [("xdp", hook::XDP), ("tc", hook::INGRESS), ("socket", hook::SOCKET)];

/// The counters of a packet path, each summed over all CPUs.
pub struct Counters(PerCpuArray<MapData, abi::OutcomeCounters>);

impl Counters {
    pub fn of(agent: &Agent) -> Result<Self> {
        let version = fs::read_dir(agent.pin_dir())?.next().context("nothing is pinned")??.path();
        let map = MapData::from_pin(version.join("maps/tp_counters"))?;
        Ok(Self(Map::PerCpuArray(map).try_into()?))
    }

    /// Returns one counter; fails if none has this name.
    pub fn get(&self, hook: &str, outcome: &str) -> Result<u64> {
        let hook = HOOKS.iter().find(|(name, _)| *name == hook).context("no such hook")?;
        let outcome = Outcome::ALL.iter().find(|found| found.name() == outcome).context("no such outcome")?;
        self.at(hook.1, *outcome)
    }

    pub fn read(&self) -> Result<Counted> {
        let mut all = Counted::new();
        for (name, number) in HOOKS {
            for outcome in Outcome::ALL {
                all.insert((name, outcome.name()), self.at(number, *outcome)?);
            }
        }
        Ok(all)
    }

    fn at(&self, hook: u32, outcome: Outcome) -> Result<u64> {
        Ok(self.0.get(&hook, 0)?.iter().map(|cpu| cpu[outcome as usize]).sum())
    }
}
