//! Epochs and hops: when stored next hops must be resolved again, and where new ones find room.
//!
//! A route change concerns each flow by itself: two flows that share a hop may have to part. So flows carry the route
//! epoch and ask the FIB once after it was raised (about 100 ns each). A changed MAC concerns a hop: hops carry the hop
//! epoch, and one FIB lookup a hop is enough.

use std::net::IpAddr;

use anyhow::{Context, Result};
use traffic_policy_ebpf::abi::{HOP_ARENA, HopKey};

use super::{
    tables::{Tables, from_wide},
    words::{state, used_hops},
};

/// What may be wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Changed {
    /// A route, an address or a link.
    Routes,
    /// The MAC address of a neighbour.
    Neighbours,
}

/// A next hop in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct NextHop {
    pub ifindex: u32,
    pub gateway: IpAddr,
    /// Its MAC address as packets carry it.
    pub mac: [u8; 6],
}

/// Hands out room for hops.
///
/// The packet path numbers new hops upwards within one of two arenas. When an arena is nearly full the agent empties
/// the other one and moves there, raising the route epoch: flows then ask the FIB before they use a hop again, so
/// nothing of the old arena is used any more.
#[derive(Debug, Default)]
pub struct Arena;

impl Arena {
    /// Raises the epoch.
    ///
    /// # Errors
    /// The hops cannot be emptied.
    pub fn raise(&mut self, tables: &mut Tables, changed: Changed) -> Result<()> {
        if changed == Changed::Routes {
            let route = route(tables);
            set_route(tables, route >> 16, next_epoch(route));
        }
        let epoch = tables.state.load(state::hop_epoch);
        tables.state.store(state::hop_epoch, epoch.wrapping_add(1).max(1));
        Ok(())
    }

    /// Moves to the other arena when this one is nearly full.
    ///
    /// # Errors
    /// The hops cannot be emptied.
    pub fn renew(&mut self, tables: &mut Tables) -> Result<()> {
        let route = route(tables);
        let arena = route >> 16 & 1;
        let used = tables.usage.load(used_hops(arena));
        if used < u64::from(HOP_ARENA) * 9 / 10 {
            return Ok(());
        }
        let other = 1 - arena;
        let old: Vec<HopKey> = tables
            .hop_index
            .keys()
            .filter_map(Result::ok)
            .filter(|key| u32::from(key.arena) == other)
            .collect();
        for key in old {
            tables.hop_index.remove(&key).context("emptying the hops failed")?;
        }
        tables.usage.store(used_hops(other), 0);
        set_route(tables, other, next_epoch(route));
        tracing::info!(used, "moved to fresh next hops");
        Ok(())
    }

    /// Hops of the arena in use.
    ///
    /// # Errors
    /// The maps cannot be read.
    pub fn list(&self, tables: &Tables) -> Result<Vec<NextHop>> {
        let arena = (route(tables) >> 16) as u8;
        let mut hops = Vec::new();
        for entry in &tables.hop_index {
            let (key, index) = entry.context("reading the hops failed")?;
            if key.arena != arena {
                continue;
            }
            let gateway = from_wide(key.gateway, i32::from(key.family) != libc::AF_INET);
            let hop = tables.hops.get(&index, 0).context("reading a hop failed")?;
            let bytes = hop.macs.to_ne_bytes();
            let mac = [bytes[0], bytes[1], bytes[2], bytes[3], bytes[4], bytes[5]];
            hops.push(NextHop { ifindex: key.ifindex, gateway, mac });
        }
        hops.sort_unstable();
        Ok(hops)
    }
}

fn route(tables: &Tables) -> u32 {
    tables.state.load(state::route)
}

fn set_route(tables: &mut Tables, arena: u32, epoch: u16) {
    tables.state.store(state::route, arena << 16 | u32::from(epoch));
}

/// 0 stands for "never resolved".
fn next_epoch(route: u32) -> u16 {
    (route as u16).wrapping_add(1).max(1)
}
