//! Parameters and results of a sweep, the garbage collection of flows.

use crate::tcp::{Timeouts, class};

/// Whether a sweep marks the flows of the endpoints in `tp_removed_eps`.
pub mod mark {
    pub const NONE: u32 = 0;
    /// Marks them in addition to everything else that a sweep does.
    pub const TOO: u32 = 1;
    /// Marks them and does nothing else. Such a sweep may follow another one at once, whereas other
    /// checks compare two sweeps and need time in between for changes.
    pub const ONLY: u32 = 2;
}

/// The parameters and results of a sweep. One element, written by one sweep at a time.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Sweep {
    /// 0: IPv4, 1: IPv6.
    pub ipv6: u32,
    /// The idle time in jiffies, by [`mod@class`], after which flows are removed early, and the
    /// largest number of flows to remove so. The latter is counted down.
    pub pressure: [u32; class::COUNT],
    pub surplus: [u32; class::COUNT],
    /// The time-outs, in jiffies: see [`crate::tcp::Timeouts`].
    pub timeouts: Timeouts,
    /// See [`mark`].
    pub mark: u32,
    /// Out: jiffies at the start, low half.
    pub now: u32,
    /// Out: entries in the table.
    pub entries: u32,
    /// Out: request entries with SNAT.
    pub snat: u32,
    /// Out: unassured flows: TCP with SCTP, and UDP.
    pub unassured: u32,
    pub unassured_udp: u32,
    pub marked: u32,
    pub deleted: u32,
    /// Out: flows of each class by the logarithm of their idle time: index i counts those idle for
    /// less than 2^(i+1) jiffies.
    pub idle: [[u32; 32]; class::COUNT],
    /// The elements visited so far, of any table.
    pub visited: u32,
    /// 1: the piece ends before the next element.
    pub pause: u32,
}
