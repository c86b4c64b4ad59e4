//! Events for `monitor`: refusals and new flows, written to a ring buffer.
//!
//! Usually there is no reader. The cost then is one load, and only for packets that are refused or
//! create a flow.

use aya_ebpf::helpers::{bpf_ringbuf_reserve, bpf_ringbuf_submit};
use traffic_policy_ebpf::{
    abi::{Address, MonitorEvent, Port, Tuple},
    outcome::Outcome,
};

use crate::datapath::{
    clock,
    family::Family,
    maps::{CONFIG, EVENT_LIMITS, EVENTS, Table},
};

/// The interval in nanoseconds between events: one CPU writes at most 1,000 a second.
const INTERVAL: u64 = 1_000_000;
/// The burst allowed after a quiet time, in nanoseconds: 128 events.
const BURST: u64 = 128 * INTERVAL;

/// The fields of an event about a packet or call.
pub struct NewEvent<A> {
    /// See [`hook`][traffic_policy_ebpf::abi::hook].
    pub hook: u32,
    pub outcome: Outcome,
    /// The index of the Service port, or [`NO_SERVICE`][traffic_policy_ebpf::abi::NO_SERVICE].
    pub service: u32,
    /// The device by which a packet came; 0 for a socket.
    pub ifindex: u32,
    /// The cookie of a socket's network namespace; 0 for a packet.
    pub netns: u64,
    /// The tuple of the packet as it came; source and its port are zero where a socket has none
    /// yet.
    pub tuple: Tuple<A>,
    /// The endpoint of a new flow; otherwise zero.
    pub endpoint: (A, Port),
}

/// Writes an event, if there is a reader and the rate limit allows it. `new_event` is called only
/// then.
#[inline(always)]
pub fn emit<F: Family>(new_event: impl FnOnce() -> NewEvent<F::Address>) {
    let Some(config) = CONFIG.get_ptr(0) else { return };
    let until = get!(config.monitor_until);
    if until == 0 {
        return;
    }
    let now = clock::nanoseconds();
    if until <= now {
        return;
    }
    let Some(bucket) = EVENT_LIMITS.get_ptr_mut(0) else { return };
    let paid_until = get!(bucket.paid_until);
    let earliest = now.wrapping_sub(BURST);
    let paid_until = if paid_until < earliest { earliest } else { paid_until };
    if paid_until > now {
        set!(bucket.suppressed += 1);
        return;
    }
    // SAFETY: a helper of the kernel: the verifier checks its arguments, and that its result is
    // submitted once.
    let event = unsafe {
        bpf_ringbuf_reserve(Table::of(&raw const EVENTS).raw(), size_of::<MonitorEvent>() as u64, 0)
    }
    .cast::<MonitorEvent>();
    if event.is_null() {
        set!(bucket.suppressed += 1);
        return;
    }
    let new_event = new_event();
    let tuple = new_event.tuple;
    set!(event.time = now);
    set!(event.source = tuple.source.wide());
    set!(event.destination = tuple.destination.wide());
    set!(event.endpoint = new_event.endpoint.0.wide());
    set!(event.ports = tuple.ports);
    set!(event.endpoint_port = new_event.endpoint.1);
    set!(event.protocol = tuple.protocol as u8);
    set!(event.ipv6 = F::V6 as u8);
    set!(event.hook = new_event.hook);
    set!(event.outcome = new_event.outcome as u32);
    set!(event.service = new_event.service);
    set!(event.ifindex = new_event.ifindex);
    set!(event.netns = new_event.netns);
    set!(event.suppressed = get!(bucket.suppressed) as u32);
    set!(event.zero = 0);
    set!(bucket.suppressed = 0);
    set!(bucket.paid_until = paid_until + INTERVAL);
    // SAFETY: as above.
    unsafe { bpf_ringbuf_submit(event.cast(), 0) };
}
