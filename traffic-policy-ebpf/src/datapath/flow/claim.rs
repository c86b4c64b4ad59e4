//! The claim of one CPU on an entry that it is about to remove or overwrite, so that no other CPU
//! does the same. It takes the place of the entry's numbers.

use traffic_policy_ebpf::abi::{Address, Flow};

use crate::datapath::barrier::{compare_exchange, exchange};

/// The numbers of an entry that a CPU is taking over, removing or overwriting. (A connection has
/// these numbers once in 2^64.)
pub const CLAIMED: u64 = u64::MAX;

/// Claims an entry and returns its numbers: [`CLAIMED`] if another CPU was first, which may have
/// put its own flow there by now.
#[inline(always)]
pub fn claim<A: Address>(entry: *mut Flow<A>) -> u64 {
    exchange(place!(mut entry.numbers), CLAIMED)
}

/// Reverts a claim. An entry that was reused since, or assured, has numbers of its own, which stay.
#[inline(always)]
pub fn give_back<A: Address>(entry: *mut Flow<A>, former: u64) {
    compare_exchange(place!(mut entry.numbers), CLAIMED, former);
}
