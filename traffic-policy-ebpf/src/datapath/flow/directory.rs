//! The directory of flows: an array with twice as many places as a table has room for flows, by
//! which expired ones are found in a full table. Each flow of the main table takes a free place
//! when it is created, and returns it when it is removed.

use traffic_policy_ebpf::abi::{Flow, Tuple};

use crate::datapath::{
    family::Family,
    value::{borrow, load, store},
};

/// The places tried for a new flow. At most half of them are taken, so one flow of 256 gets none.
const TRIES: u32 = 8;

/// Returns a free place of the directory, 0 if none was found. `spread` chooses the places to try
/// after the next one.
#[inline(always)]
pub fn free_place<F: Family>(spread: u32) -> u32 {
    let Some(scratch) = F::scratch() else { return 0 };
    let last = F::directory_last();
    let at = place!(mut scratch.directory_at);
    store(at, (load(at) + 1) & last);
    let mut turn = 0;
    while turn < TRIES {
        let free = match F::directory().lookup::<u32, Tuple<F::Address>>(borrow(at)) {
            Some(held) => get!(held.protocol) == 0,
            None => false,
        };
        if free && load(at) != 0 {
            return load(at);
        }
        turn += 1;
        store(at, (load(at) + spread.wrapping_mul(2 * turn + 1)) & last);
    }
    0
}

/// Notes a flow at its place.
#[inline(always)]
pub fn enter<F: Family>(place: u32, tuple: &Tuple<F::Address>) {
    let Some(scratch) = F::scratch() else { return };
    set!(scratch.directory_look = place);
    if place != 0
        && let Some(held) =
            F::directory().lookup::<u32, Tuple<F::Address>>(borrow(place!(const scratch.directory_look)))
    {
        store(held, *tuple);
    }
}

/// Gives the place of a request entry back to the directory.
#[inline(always)]
pub fn leave<F: Family>(request: *const Flow<F::Address>) {
    // The key lies in the entry: the stack of a callback has no room for it.
    leave_place::<F>(borrow(place!(const request.device_or_place).cast()));
}

/// Gives a place back, as [`leave`] does. `place` lies on the stack or in a map: before Linux 6.2
/// an iterator's element cannot be a key.
#[inline(always)]
pub fn leave_place<F: Family>(place: &u32) {
    if let Some(held) = F::directory().lookup::<u32, Tuple<F::Address>>(place) {
        set!(held.protocol = 0);
    }
}
