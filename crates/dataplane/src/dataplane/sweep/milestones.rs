//! Milestones in the flow tables: entries that no packet matches, at which a piece of a sweep ends.
//!
//! The kernel passes the empty buckets of a hash table in one go (`bpf_hash_map_seq_find_next`),
//! and only an element can end a read. Of a table that is nearly empty, one read takes 13 ns a
//! bucket: 3.4 ms at the default size, and proportionally more in a larger table, in which neither
//! the run loop nor, without preemption, its CPU does anything else.

use anyhow::{Context, Result};
use aya::maps::{HashMap, MapData};
use traffic_policy_ebpf::abi::{Address, Flow, FlowKey};

use crate::dataplane::{
    maps::Maps,
    sys::{self, BPF_NOEXIST},
};

/// The mean distance of milestones, in buckets: with it 0.05 ms. Few distances are four times as
/// long, as a hash decides.
const DISTANCE: u32 = 4_096;
/// The size of a table, in entries, from which on there are any.
const LEAST: u32 = 4 * DISTANCE;

/// Enters the milestones that are not there yet. A full table may lack some: nor does it need them.
///
/// # Errors
/// The kernel refuses a write for another reason.
pub fn enter(maps: &mut Maps) -> Result<()> {
    of_table(&mut maps.v4.flows, maps.v4.size)?;
    of_table(&mut maps.v6.flows, maps.v6.size)
}

/// Returns the number of milestones of a table with room for `size` entries.
fn number(size: u32) -> u16 {
    if size < LEAST { 0 } else { u16::try_from(size / DISTANCE).unwrap_or(u16::MAX) }
}

fn of_table<A: Address>(flows: &mut HashMap<MapData, FlowKey<A>, Flow<A>>, size: u32) -> Result<()>
where
    FlowKey<A>: aya::Pod,
    Flow<A>: aya::Pod,
{
    for number in 0..number(size) {
        let Err(error) = flows.insert(FlowKey::milestone(number), Flow::default(), BPF_NOEXIST) else {
            continue;
        };
        match sys::error_number(&error) {
            Some(libc::EEXIST) => {}
            Some(libc::E2BIG) => break,
            _ => return Err(error).context("entering a milestone of sweeps failed"),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_table_keeps_its_room() {
        assert_eq!([128, 16_383, 16_384, 65_536, 262_144].map(number), [0, 0, 4, 16, 64]);
        assert_eq!(number(u32::MAX), u16::MAX);
    }
}
