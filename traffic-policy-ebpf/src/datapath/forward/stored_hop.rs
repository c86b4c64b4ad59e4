//! Hops in `tp_nexthops`: their indices, and how they are written while packets read them.

use traffic_policy_ebpf::abi::{HOPS_PER_GENERATION, Hop, HopKey, RuntimeConfig};

use crate::datapath::{
    barrier::{fetch_add, full_fence},
    maps::{NEXTHOP_IDS, NOEXIST, TABLE_USAGE, Table},
    value::{load, load_once, store_once},
};

/// Writes a hop. A reader that learns its index afterwards sees all of it: the fence is the
/// writer's, and a reader needs none, because the address of its load depends on the index.
///
/// Two CPUs may write at once, and the slower one may have the older answer of the FIB: its MAC
/// must not stay under the other's epoch. Each looks once more behind the fence, and one of them
/// sees that the other has written, or that the epoch was raised; then the hop is invalidated, and
/// is resolved again.
///
/// A hop that already holds the same values, because another CPU has just written it, is not
/// written again: its cache line stays shared by all CPUs whose packets use it.
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
        // An epoch that is neither the current one, nor one that is used soon.
        store_once(place!(mut hop.epoch), found.epoch.wrapping_sub(1));
    }
}

/// Returns the index of a hop: its own if it has one, otherwise the next free one of the
/// generation; 0 if there is none.
#[inline(always)]
pub fn index(key: &HopKey) -> u32 {
    let table = Table::of(&raw const NEXTHOP_IDS);
    if let Some(index) = table.lookup::<HopKey, u32>(key) {
        return load(index);
    }
    let Some(usage) = TABLE_USAGE.get_ptr_mut(0) else { return 0 };
    let generation = (key.generation & 1) as u32;
    let counter = if generation == 0 { place!(mut usage.hops[0]) } else { place!(mut usage.hops[1]) };
    // Index 0 of the first generation means "none".
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
