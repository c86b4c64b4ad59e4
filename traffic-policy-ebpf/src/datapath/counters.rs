//! Packets counted by outcome: of each hook, and of each Service port.
//!
//! Flows count their own packets, so that an established packet pays nothing for its Service. The
//! counters of Service ports hold refusals, and flows that have ended.

use core::ptr;

use traffic_policy_ebpf::{
    abi::{Address, Flow, NO_SERVICE, OutcomeCounters, ServiceCount, ServiceCountKey, hook, kind},
    outcome::Outcome,
};

use crate::datapath::{
    barrier::fetch_add,
    maps::{COUNTERS, NOEXIST, SERVICE_COUNTS, Table},
    value::{load, store},
};

/// This CPU's counters of a hook. The pointer is never null, but the verifier does not know that.
#[inline(always)]
pub fn of_hook(hook: u32) -> *mut OutcomeCounters {
    COUNTERS.get_ptr_mut(hook).unwrap_or(ptr::null_mut())
}

/// Adds one packet.
#[inline(always)]
pub fn count(counters: *mut OutcomeCounters, outcome: Outcome) {
    if !counters.is_null() {
        let count = counters.cast::<u64>().wrapping_add(outcome as usize);
        store(count, load(count) + 1);
    }
}

/// Counts the outcome of a socket call. Another process on the same CPU may interrupt this one
/// here.
#[inline(always)]
pub fn count_call(outcome: Outcome) {
    if let Some(counters) = COUNTERS.get_ptr_mut(hook::SOCKET) {
        fetch_add(counters.cast::<u64>().wrapping_add(outcome as usize), 1);
    }
}

static NONE: ServiceCount = ServiceCount { packets: 0, bytes: 0, flows: 0 };

/// Adds to the counters of a Service port; does nothing for [`NO_SERVICE`].
#[inline(always)]
pub fn add(service: u32, outcome: Outcome, packets: u64, bytes: u64, flows: u64) {
    if service == NO_SERVICE {
        return;
    }
    let table = Table::of(&raw const SERVICE_COUNTS);
    let key = ServiceCountKey { service, outcome: outcome as u32 };
    let mut count: *mut ServiceCount = table.lookup(&key).unwrap_or(ptr::null_mut());
    if count.is_null() {
        // Another CPU may be first; the result is the same.
        table.insert(&key, &raw const NONE, NOEXIST);
        count = table.lookup(&key).unwrap_or(ptr::null_mut());
    }
    if count.is_null() {
        return;
    }
    // An atomic addition of zero costs as much as any other, and the compiler cannot omit it.
    if packets != 0 {
        fetch_add(place!(mut count.packets), packets);
    }
    if bytes != 0 {
        fetch_add(place!(mut count.bytes), bytes);
    }
    if flows != 0 {
        fetch_add(place!(mut count.flows), flows);
    }
}

/// Adds the traffic of an entry that is about to be removed.
#[inline(always)]
pub fn end<A: Address>(entry: *const Flow<A>) {
    let (kind, service, packets, bytes) =
        (get!(entry.kind), get!(entry.service), get!(entry.packets).count(), get!(entry.bytes));
    let outcome = match kind {
        kind::FORWARD => Outcome::Forwarded,
        kind::REPLY => Outcome::Replied,
        kind::DELIVER => Outcome::Delivered,
        kind::REPLY_LOCAL => Outcome::RepliedLocal,
        _ => return,
    };
    add(service, outcome, packets, if packets == 0 { 0 } else { bytes }, 1);
}
