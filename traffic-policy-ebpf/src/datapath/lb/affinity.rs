//! Session affinity: the endpoint that a client used last, and the search for it in a list.

use traffic_policy_ebpf::abi::{
    Address, Address4, Address6, Affinity, AffinityKey, AffinityLookup, AffinityMatch, Port, Slot, client,
    step,
};

use aya_ebpf::{cty::c_void, helpers::bpf_loop};

use crate::datapath::{
    clock::{self, NANOSECONDS_PER_SECOND},
    family::{Family, V4, V6},
    lb::{Client, List},
    maps::{AFFINITY, ANY, Table},
    trace,
    value::{borrow, load},
};

/// The number of endpoints of one list that are searched for the client's endpoint.
const MOST_ENDPOINTS: u32 = 1 << 16;

/// The value for "not in the list".
pub const NONE: u32 = u32::MAX;

/// Returns the offset of the endpoint of a client of a Service with affinity: the one it used last,
/// otherwise `fresh`.
#[inline(always)]
pub fn endpoint_of_client<F: Family>(
    list: &List,
    client: &Client<F::Address>,
    lookup: *mut AffinityLookup<F::Address>,
    fresh: u32,
    lasts: u32,
) -> u32 {
    let now = clock::nanoseconds();
    set!(
        lookup.key = AffinityKey {
            client: if client.netns == 0 { client.source.wide().wire() } else { [client.netns, 0] },
            service: list.service,
            list: list.local as u16,
            kind: if client.netns == 0 { client::ADDRESS } else { client::NETNS },
        }
    );
    set!(lookup.valid_from = now.wrapping_sub(lasts as u64 * NANOSECONDS_PER_SECOND));
    set!(lookup.base = list.range.base);
    set!(lookup.len = list.range.len);
    let mut offset = had::<F>(lookup);
    // Time-outs are whole seconds, and CPUs contend for memory that is written for every connection
    // and every datagram of an unconnected socket.
    if offset != NONE && now.wrapping_sub(get!(lookup.value.used)) < NANOSECONDS_PER_SECOND {
        trace::note(step::AFFINITY, AffinityMatch::Kept as u32, [0; 2]);
        return offset;
    }
    if offset == NONE {
        // A client that came by the other list keeps its endpoint if that is in this list too, for
        // example after a change of policy.
        set!(lookup.key.list = !list.local as u16);
        offset = had::<F>(lookup);
        set!(lookup.key.list = list.local as u16);
    }
    trace::note(step::AFFINITY, AffinityMatch::of(offset != NONE) as u32, [0; 2]);
    if offset == NONE {
        offset = fresh;
    }
    let index = list.range.base + offset;
    if let Some(slot) = F::slots().lookup::<u32, Slot<F::Address>>(&index) {
        set!(
            lookup.value = Affinity {
                endpoint: get!(slot.address).wide(),
                used: now,
                offset,
                port: get!(slot.port),
                zero: 0
            }
        );
        let key = borrow(place!(const lookup.key));
        Table::of(&raw const AFFINITY).insert(key, place!(const lookup.value), ANY);
    }
    offset
}

/// Returns the offset within the list of the endpoint stored under the key in `lookup`, if it is
/// there and not too old; otherwise [`NONE`]. Leaves in `lookup` the time of its last use.
#[inline(always)]
fn had<F: Family>(lookup: *mut AffinityLookup<F::Address>) -> u32 {
    let offset = if F::V6 { remembered6(lookup.cast()) } else { remembered4(lookup.cast()) };
    offset as u32
}

/// Returns the place of an endpoint within a list, [`NONE`] if it is not there; `guess` is tried
/// first.
#[inline(always)]
pub fn find<F: Family>(
    list: &List,
    address: F::Address,
    port: Port,
    guess: u32,
    lookup: *mut AffinityLookup<F::Address>,
) -> u32 {
    set!(lookup.base = list.range.base);
    set!(lookup.len = list.range.len);
    set!(lookup.address = address);
    set!(lookup.port = port);
    set!(lookup.offset = guess);
    let offset = if F::V6 { search6(lookup.cast()) } else { search4(lookup.cast()) };
    offset as u32
}

global_functions! {
    remembered4 => remembered::<V4>, lookup: *mut AffinityLookup<Address4>;
    remembered6 => remembered::<V6>, lookup: *mut AffinityLookup<Address6>;
    search4 => search::<V4>, lookup: *mut AffinityLookup<Address4>;
    search6 => search::<V6>, lookup: *mut AffinityLookup<Address6>;
}

/// Implements [`had`].
#[inline(always)]
fn remembered<F: Family>(lookup: *mut AffinityLookup<F::Address>) -> i32 {
    if lookup.is_null() {
        return NONE as i32;
    }
    // A copy: Linux 6.1 does not accept the argument of a global function as memory for keys.
    let key = get!(lookup.key);
    let Some(had) = Table::of(&raw const AFFINITY).lookup::<_, Affinity>(&key) else { return NONE as i32 };
    let used = get!(had.used);
    // By wrapping difference, because a time-out may reach back beyond the start of the clock.
    if used.wrapping_sub(get!(lookup.valid_from)) as i64 <= 0 {
        return NONE as i32;
    }
    set!(lookup.value.used = used);
    set!(lookup.address = F::narrow(get!(had.endpoint)));
    set!(lookup.port = get!(had.port));
    set!(lookup.offset = get!(had.offset));
    search::<F>(lookup)
}

/// Returns the place of the endpoint in `lookup` within the list in `lookup`, as [`find`] does; the
/// `offset` in `lookup` is tried first.
#[inline(always)]
fn search<F: Family>(lookup: *mut AffinityLookup<F::Address>) -> i32 {
    if lookup.is_null() {
        return NONE as i32;
    }
    let guess = get!(lookup.offset);
    if guess < get!(lookup.len)
        && is_at::<F>(get!(lookup.base) + guess, get!(lookup.address), get!(lookup.port))
    {
        return guess as i32;
    }
    set!(lookup.found = 0);
    set!(lookup.offset = 0);
    // The kernel requires the context of a loop on the stack.
    let mut context = lookup;
    // SAFETY: a helper of the kernel: the verifier checks its arguments, and the callback with
    // them.
    unsafe { bpf_loop(MOST_ENDPOINTS, turn::<F>(), (&raw mut context).cast::<c_void>(), 0) };
    if get!(lookup.found) != 0 { get!(lookup.offset) as i32 } else { NONE as i32 }
}

#[inline(always)]
fn is_at<F: Family>(index: u32, address: F::Address, port: Port) -> bool {
    let Some(slot) = F::slots().lookup::<u32, Slot<F::Address>>(&index) else { return false };
    get!(slot.address) == address && get!(slot.port) == port
}

/// Performs one turn of the search: 0 to continue, 1 to stop.
#[inline(always)]
fn next_slot<F: Family>(lookup: *mut AffinityLookup<F::Address>) -> i64 {
    if get!(lookup.offset) >= get!(lookup.len) {
        return 1;
    }
    if is_at::<F>(get!(lookup.base) + get!(lookup.offset), get!(lookup.address), get!(lookup.port)) {
        set!(lookup.found = 1);
        return 1;
    }
    set!(lookup.offset += 1);
    0
}

/// The [`next_slot`] of a family, as a callback of `bpf_loop`.
#[inline(always)]
fn turn<F: Family>() -> *mut c_void {
    if F::V6 { next_slot6 as *mut c_void } else { next_slot4 as *mut c_void }
}

extern "C" fn next_slot4(_: u64, lookup: *mut *mut AffinityLookup<Address4>) -> i64 {
    next_slot::<V4>(load(lookup))
}

extern "C" fn next_slot6(_: u64, lookup: *mut *mut AffinityLookup<Address6>) -> i64 {
    next_slot::<V6>(load(lookup))
}
