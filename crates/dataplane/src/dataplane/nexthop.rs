//! Epochs of next hops, and the two generations of the map that holds them.
//!
//! A route change concerns each flow by itself: two flows that share a hop may have to part. Flows
//! therefore carry the route epoch and query the FIB once after it was raised (about 100 ns each).
//! A changed MAC concerns a hop: hops carry the hop epoch, and one FIB lookup per hop is enough.
//!
//! The packet path numbers new hops upwards within one of two generations. When the current one is
//! nearly full, the agent empties the other one and moves to it, raising the route epoch: flows
//! then query the FIB before they use a hop again, so no hop of the old generation is used any
//! more.

use std::net::IpAddr;

use anyhow::{Context, Result};
use traffic_policy_ebpf::abi::{HOP_NO_ETHERNET, HOP_POD, HOPS_PER_GENERATION, HopKey};

use super::{
    Dataplane,
    maps::{
        Maps,
        keys::from_wide,
        mmap::{config, routes, used_hops},
    },
    route_mtus,
};
use crate::node::RouteMtus;

/// The next hops that the packet path has stored, and the routes that they were found by.
pub trait NextHops {
    /// Raises the epoch, because stored routes or neighbours may be wrong: stored next hops are
    /// resolved again before they are used.
    fn raise(&mut self, changed: Changed);

    /// Compares the fingerprint of the node's routes with the one that stored next hops belong to.
    /// If they differ, no agent was watching when the routes changed, and the epoch is raised.
    /// Returns whether they differ.
    fn compare_network(&mut self, fingerprint: u32) -> bool;

    /// Stores the fingerprint of the routes that [`Self::raise`] was called for.
    fn note_network(&mut self, fingerprint: u32);

    /// Returns the next hops in use that have a MAC address.
    fn next_hops(&self) -> Result<Vec<NextHop>>;

    /// Writes the MTUs of routes. Returns whether they changed: in that case stored next hops may
    /// be wrong.
    fn set_route_mtus(&mut self, mtus: &RouteMtus) -> Result<bool>;
}

/// The kinds of change that may invalidate next hops.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Changed {
    /// A change of a route, an address or a link.
    Routes,
    /// A change of a neighbour's MAC address.
    Neighbours,
}

/// A next hop in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct NextHop {
    pub ifindex: u32,
    pub gateway: IpAddr,
    /// The MAC address as packets carry it.
    pub mac: [u8; 6],
}

impl NextHops for Dataplane {
    fn raise(&mut self, changed: Changed) {
        let maps = &mut self.maps;
        if changed == Changed::Routes {
            let route = route(maps);
            set_route(maps, route >> 16, next_epoch(route));
        }
        let epoch = maps.prefilter.load(routes::hop_epoch);
        maps.prefilter.store(routes::hop_epoch, epoch.wrapping_add(1).max(1));
    }

    fn compare_network(&mut self, fingerprint: u32) -> bool {
        let changed = self.maps.config.load(config::network) != fingerprint;
        if changed {
            self.raise(Changed::Routes);
            self.note_network(fingerprint);
        }
        changed
    }

    fn note_network(&mut self, fingerprint: u32) {
        self.maps.config.store(config::network, fingerprint);
    }

    fn next_hops(&self) -> Result<Vec<NextHop>> {
        let maps = &self.maps;
        let generation = (route(maps) >> 16) as u8;
        let mut hops = Vec::new();
        for entry in &maps.hop_index {
            let (key, index) = entry.context("reading the hops failed")?;
            if key.generation != generation {
                continue;
            }
            let gateway = from_wide(key.gateway, i32::from(key.family) != libc::AF_INET);
            let hop = maps.hops.get(&index, 0).context("reading a hop failed")?;
            // Pods' hops are learned from their packets.
            if hop.flags & (HOP_NO_ETHERNET | HOP_POD) != 0 {
                continue;
            }
            let bytes = hop.macs.to_ne_bytes();
            let mac = [bytes[0], bytes[1], bytes[2], bytes[3], bytes[4], bytes[5]];
            hops.push(NextHop { ifindex: key.ifindex, gateway, mac });
        }
        hops.sort_unstable();
        Ok(hops)
    }

    fn set_route_mtus(&mut self, mtus: &RouteMtus) -> Result<bool> {
        if self.route_mtus.as_ref() == Some(mtus) {
            return Ok(false);
        }
        let room = self.maps.room.route_mtus;
        let said = self.route_mtus.take().is_some_and(|known| known.fitting(room).1 > 0);
        let (fitting, left_out) = mtus.fitting(room);
        let differed = route_mtus::write(&mut self.maps, &fitting)?;
        self.route_mtus = Some(mtus.clone());
        if left_out > 0 && !said {
            tracing::warn!(
                "the main routing table has {} prefixes whose MTUs differ from those around them, and {left_out} find no room in \
                 tp_route_mtus4 and tp_route_mtus6: packets there are judged by the MTU of the prefix around",
                mtus.0.len()
            );
        }
        Ok(differed)
    }
}

/// Moves to the other generation when the current one is nearly full, and returns it.
pub fn renew(maps: &mut Maps) -> Result<Option<u32>> {
    let route = route(maps);
    let generation = route >> 16 & 1;
    let used = maps.usage.load(used_hops(generation));
    if used < u64::from(HOPS_PER_GENERATION) * 9 / 10 {
        return Ok(None);
    }
    let other = 1 - generation;
    let old: Vec<HopKey> = maps
        .hop_index
        .keys()
        .filter_map(Result::ok)
        .filter(|key| u32::from(key.generation) == other)
        .collect();
    for key in old {
        maps.hop_index.remove(&key).context("emptying the hops failed")?;
    }
    maps.usage.store(used_hops(other), 0);
    set_route(maps, other, next_epoch(route));
    tracing::info!(used, "moved to fresh next hops");
    Ok(Some(other))
}

/// Whether the route epoch has ever been raised.
pub fn has_epoch(maps: &Maps) -> bool {
    route(maps) & 0xffff != 0
}

fn route(maps: &Maps) -> u32 {
    maps.prefilter.load(routes::route)
}

fn set_route(maps: &mut Maps, generation: u32, epoch: u16) {
    maps.prefilter.store(routes::route, generation << 16 | u32::from(epoch));
}

/// Returns the next epoch; 0 stands for "never resolved".
fn next_epoch(route: u32) -> u16 {
    (route as u16).wrapping_add(1).max(1)
}
