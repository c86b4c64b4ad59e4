//! Hops as `tp_nexthops` holds them: their numbers, and how they are written beside packets that
//! read them.

use traffic_policy_ebpf::abi::{HOPS_PER_GENERATION, Hop, HopKey, RuntimeConfig};

use crate::datapath::{
    barrier::{fetch_add, full_fence},
    maps::{NEXTHOP_IDS, NOEXIST, TABLE_USAGE, Table},
    value::{load, load_once, store_once},
};

/// Writes a hop. Whoever learns its number afterwards sees all of it: the fence is the writer's,
/// and a reader needs none, for the place that it reads depends on the number.
///
/// Two CPUs may write at once, and the slower one have the older answer of the FIB: its MAC must
/// not stay under the other's epoch. Each looks once more behind the fence, and one of them sees
/// that the other was there, or that the epoch was raised; then nobody believes the hop, and it is
/// resolved again.
///
/// A hop that already holds the same values, because another CPU has just written it, is not
/// written again: its cache line stays with all CPUs whose packets leave by it.
#[inline(always)]
pub fn write(hop: *mut Hop, found: &Hop, config: *const RuntimeConfig, own: *mut u64) {
    if load_once(place!(const hop.resolved)) == found.resolved
        && load_once(place!(const hop.epoch)) == found.epoch
        && load_once(place!(const hop.macs)) == found.macs
        && load_once(place!(const hop.source_mac_tail)) == found.source_mac_tail
        && load_once(place!(const hop.ifindex)) == found.ifindex
        && load_once(place!(const hop.mtu)) == found.mtu
        && load_once(place!(const hop.flags)) == found.flags
    {
        return;
    }
    store_once(place!(mut hop.macs), found.macs);
    store_once(place!(mut hop.source_mac_tail), found.source_mac_tail);
    store_once(place!(mut hop.ifindex), found.ifindex);
    store_once(place!(mut hop.mtu), found.mtu);
    store_once(place!(mut hop.flags), found.flags);
    store_once(place!(mut hop.resolved), found.resolved);
    store_once(place!(mut hop.epoch), found.epoch);
    full_fence(own);
    let macs = load_once(place!(const hop.macs)) ^ found.macs;
    let epoch = load_once(place!(const config.hop_epoch)) ^ found.epoch;
    if macs | epoch as u64 != 0 {
        // Neither the current one, nor one to come for a long time.
        store_once(place!(mut hop.epoch), found.epoch.wrapping_sub(1));
    }
}

/// The index of a hop: its own if it has one, else the next free one of the generation; 0 if there
/// is none.
#[inline(always)]
pub fn index(key: &HopKey) -> u32 {
    let table = Table::of(&raw const NEXTHOP_IDS);
    if let Some(index) = table.lookup::<HopKey, u32>(key) {
        return load(index);
    }
    let Some(usage) = TABLE_USAGE.get_ptr_mut(0) else { return 0 };
    let generation = (key.generation & 1) as u32;
    let counter = if generation == 0 { place!(mut usage.hops[0]) } else { place!(mut usage.hops[1]) };
    // Index 0 of the first generation stands for "none".
    if load(counter) >= HOPS_PER_GENERATION as u64 - 1 {
        return 0;
    }
    let next = fetch_add(counter, 1);
    if next >= HOPS_PER_GENERATION as u64 - 1 {
        return 0;
    }
    let index = generation * HOPS_PER_GENERATION + next as u32 + 1;
    if table.insert(key, &index, NOEXIST) == 0 {
        return index;
    }
    // Another CPU was first.
    table.lookup::<HopKey, u32>(key).map_or(0, |index| load(index))
}
