//! Parameters and results of a sweep, the garbage collection of flows.

use crate::tcp::Timeouts;

/// Whether a sweep marks the flows of the endpoints in `GONE`.
pub mod mark {
    pub const NONE: u32 = 0;
    /// Beside all else that a sweep does.
    pub const TOO: u32 = 1;
    /// And does nothing else: it may follow another sweep at once, where what a sweep looks for twice must have time to
    /// change in between.
    pub const ONLY: u32 = 2;
}

/// Parameters and results of a sweep. One element, written by one sweep at a time.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Sweep {
    /// 0: IPv4, 1: IPv6.
    pub ipv6: u32,
    /// Flows idle for longer go whatever their state; `u32::MAX` unless the table is nearly full. Jiffies.
    pub pressure: u32,
    /// Time-outs, jiffies: see [`crate::tcp::Timeouts`].
    pub timeouts: Timeouts,
    /// See [`mark`].
    pub mark: u32,
    /// Out: jiffies at the start, low half.
    pub now: u32,
    /// Out: entries in the table.
    pub entries: u32,
    /// Out: request entries with SNAT.
    pub snat: u32,
    pub unconfirmed: u32,
    pub marked: u32,
    pub deleted: u32,
    /// Out: entries in `PENDING`.
    pub pending: u32,
    /// Out: flows by the logarithm of their idle time: index i counts those idle for less than 2^(i+1) jiffies.
    pub idle: [u32; 32],
    /// Elements looked at so far, of any table.
    pub visited: u32,
    /// 1: the piece ends before the next element.
    pub pause: u32,
    /// Out: Usage words at the start.
    pub snat_created: u64,
    pub pending_created: u64,
}
