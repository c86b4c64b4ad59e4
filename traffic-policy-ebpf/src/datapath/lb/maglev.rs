//! The endpoint of a new connection by its Service port's Maglev table, equal on every node:
//! docs/maglev.md.

use traffic_policy_ebpf::{
    abi::{Frontend, Tuple, frontend, maglev},
    hash,
};

use crate::datapath::{
    family::{Family, V4, V6},
    maps::{MAGLEV, Table},
    value::load,
};

/// The value for "not known": no place in a list.
const NONE: u32 = u32::MAX;

/// Returns the place of the endpoint for `Scratch::opening` within the list for policy Cluster. It
/// may be beyond the list, if the frontend was replaced meanwhile: the table is another list's.
#[inline(always)]
pub fn place<F: Family>(frontend: *const Frontend) -> u32 {
    let frontend = frontend.cast_mut();
    (if F::V6 { by_table6(frontend) } else { by_table4(frontend) }) as u32
}

global_functions! {
    by_table4 => by_table::<V4>, frontend: *mut Frontend;
    by_table6 => by_table::<V6>, frontend: *mut Frontend;
}

/// Implements [`place()`].
#[inline(always)]
fn by_table<F: Family>(frontend: *mut Frontend) -> i32 {
    if frontend.is_null() {
        return NONE as i32;
    }
    let Some(scratch) = F::scratch() else { return NONE as i32 };
    let slot = slot::<F>(frontend, get!(scratch.opening));
    place_in(get!(frontend.maglev.base), slot) as i32
}

/// Returns the slot of a connection in the tables of a frontend.
#[inline(always)]
pub fn slot<F: Family>(frontend: *const Frontend, mut tuple: Tuple<F::Address>) -> u32 {
    if frontend::is_node_port(get!(frontend.flags)) {
        // Each node has addresses of its own.
        tuple.destination = F::Address::default();
    }
    hash::pick(hash::tuple(&tuple, hash::MAGLEV_SEED), get!(frontend.maglev.len))
}

/// Returns the place that a table holds for a slot, by the table's first element.
#[inline(always)]
pub fn place_in(base: u32, slot: u32) -> u32 {
    let index = base + maglev::element_of(slot);
    let Some(element) = Table::of(&raw const MAGLEV).lookup::<u32, u64>(&index) else { return NONE };
    maglev::place(load(element), slot)
}
