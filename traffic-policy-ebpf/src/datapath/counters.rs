//! Packets counted by outcome: of each hook, and of each Service port.
//!
//! Flows count their own packets, so that an established packet pays nothing for its Service. The
//! counters of Service ports hold refusals, and flows that have ended.
//!
//! A flow's first packet is counted in its request entry before that is inserted, and is forwarded
//! by the copy in `Scratch`: this saves a look-up in the table. If the packet is not forwarded
//! after all, the count is corrected ([`settle`]).

use core::ptr;

use traffic_policy_ebpf::{
    abi::{Address, Flow, NO_SERVICE, OutcomeCounters, ServiceCount, ServiceCountKey, TO_OWNER, hook, kind},
    outcome::Outcome,
};

use crate::datapath::{
    barrier::{fetch_add, opaque},
    family::{Family, V4, V6},
    flow::table::FlowTable,
    maps::{COUNTERS, NOEXIST, SERVICE_COUNTS, Table},
    value::{borrow, load, store},
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
        kind::DIRECT if get!(entry.address_delta) & TO_OWNER != 0 => Outcome::ForwardedToOwner,
        kind::DIRECT => Outcome::ForwardedDirect,
        kind::REPLY => Outcome::Replied,
        kind::DELIVER => Outcome::Delivered,
        kind::REPLY_LOCAL => Outcome::RepliedLocal,
        _ => return,
    };
    add(service, outcome, packets, if packets == 0 { 0 } else { bytes }, 1);
}

/// Uncounts a packet that was to be forwarded by `entry`, if that is the copy of an entry which was
/// inserted for it, and the packet was not sent.
#[inline(always)]
pub fn settle<F: Family>(entry: *const Flow<F::Address>) {
    let Some(scratch) = F::scratch() else { return };
    // The addresses are compared behind the compiler's back: it would omit the test of `scratch`
    // for null, which equal addresses imply, and before Linux 6.2 the verifier does not know that.
    let is_copy = opaque(entry as u64) == place!(const scratch.request) as u64;
    // A packet that is sent is counted a second time, in the copy.
    if is_copy && get!(scratch.request.packets).count() == 1 {
        let _ = if F::V6 { uncount6() } else { uncount4() };
    }
}

global_functions! {
    uncount4 => uncount::<V4>;
    uncount6 => uncount::<V6>;
}

#[inline(always)]
fn uncount<F: Family>() -> i32 {
    let Some(scratch) = F::scratch() else { return 0 };
    let table = FlowTable::<F>::new();
    let entry = table.find_in(borrow(place!(const scratch.opening)), place!(mut scratch.flow_key));
    if !entry.is_null() && get!(entry.packets).count() != 0 {
        set!(entry.packets = get!(entry.packets).less_one());
        set!(entry.bytes -= get!(scratch.request.bytes));
    }
    0
}
