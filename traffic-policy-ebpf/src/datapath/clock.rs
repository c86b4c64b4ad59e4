//! Clocks: jiffies, and CLOCK_MONOTONIC as of the last tick.

use aya_ebpf::{
    cty::c_void,
    helpers::{bpf_jiffies64, bpf_ktime_get_coarse_ns},
};

use crate::datapath::maps::HEARTBEAT;

pub const NANOSECONDS_PER_SECOND: u64 = 1_000_000_000;

/// The low half of jiffies, the clock of flows and next hops: it costs nothing, whereas ktime costs
/// 30 ns.
#[inline(always)]
pub fn jiffies() -> u32 {
    // SAFETY: the helper has no arguments.
    unsafe { bpf_jiffies64() as u32 }
}

/// The jiffies from `last`, the time of a packet, to `now`.
#[inline(always)]
pub fn since(last: u32, now: u32) -> u32 {
    let since = now.wrapping_sub(last);
    // A packet that arrives at this moment may be a tick ahead.
    if since > u32::MAX / 2 { 0 } else { since }
}

/// The jiffies per second, as the agent measured them; 0 before the first agent has.
#[inline(always)]
pub fn hz() -> u32 {
    HEARTBEAT.get_ptr(0).map_or(0, |heartbeat| get!(heartbeat.hz))
}

/// Nanoseconds of CLOCK_MONOTONIC, as of the last tick.
#[inline(always)]
pub fn nanoseconds() -> u64 {
    // SAFETY: the helper has no arguments.
    unsafe { bpf_ktime_get_coarse_ns() }
}

/// Seconds of CLOCK_MONOTONIC.
#[inline(always)]
pub fn seconds() -> u32 {
    (nanoseconds() / NANOSECONDS_PER_SECOND) as u32
}

/// The program by which the agent reads [`jiffies`].
#[inline(always)]
pub fn run(_: *mut c_void) -> u32 {
    jiffies()
}
