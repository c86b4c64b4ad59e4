//! Parameters and results of a sweep, the garbage collection of flows.

use crate::tcp::{Timeouts, class};

/// Whether a sweep marks the flows of the endpoints in `tp_removed_eps`.
pub mod mark {
    pub const NONE: u32 = 0;
    /// Beside all else that a sweep does.
    pub const TOO: u32 = 1;
    /// And does nothing else: it may follow another sweep at once, where what a sweep looks for
    /// twice must have time to change in between.
    pub const ONLY: u32 = 2;
}

/// Parameters and results of a sweep. One element, written by one sweep at a time.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Sweep {
    /// 0: IPv4, 1: IPv6.
    pub ipv6: u32,
    /// By [`mod@class`]: flows idle for so long go before their time, in jiffies, and at most so
    /// many of them. Counted down.
    pub pressure: [u32; class::COUNT],
    pub surplus: [u32; class::COUNT],
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
    /// Out: flows that are not assured: TCP with SCTP, and UDP.
    pub unassured: u32,
    pub unassured_udp: u32,
    pub marked: u32,
    pub deleted: u32,
    /// Out: flows of each class by the logarithm of their idle time: index i counts those idle for
    /// less than 2^(i+1) jiffies.
    pub idle: [[u32; 32]; class::COUNT],
    /// Elements looked at so far, of any table.
    pub visited: u32,
    /// 1: the piece ends before the next element.
    pub pause: u32,
}
