//! Hooks and programs, their counters, and the rate limit of answers.

/// Programs that take over from the entry program of a hook, in its array of programs: index =
/// [`FAMILY`][jump::FAMILY] × (0: IPv4, 1: IPv6) + one of these constants.
pub mod jump {
    /// New flows, and flows whose state changes.
    pub const SLOW_PATH: u32 = 0;
    /// Rejections, which answer the sender, and drops.
    pub const REJECT: u32 = 1;
    /// ICMP errors about packets of flows.
    pub const ICMP_ERROR: u32 = 2;
    /// Fragments, IPv4 options and IPv6 extension headers.
    pub const VARIABLE_HEADERS: u32 = 3;
    /// [`ICMP_ERROR`] and [`VARIABLE_HEADERS`] for packets at egress.
    pub const ICMP_ERROR_OUT: u32 = 4;
    pub const VARIABLE_HEADERS_OUT: u32 = 5;
    /// The entry program of TC ingress, for packets that were given an Ethernet header, or that
    /// have lost a tag. One program serves both families, in IPv4's place.
    pub const WITH_ETHERNET: u32 = 6;
    /// The program by which replies bypass the stack at pods' devices, for both families, in the
    /// place of [`WITH_ETHERNET`].
    pub const LOCAL_DELIVERY: u32 = WITH_ETHERNET;
    /// TC: IPv4 packets that are too long for the outgoing device and may be fragmented.
    pub const SPLIT: u32 = 7;
    /// TC: frames with a priority tag. One program serves both families, in IPv6's place of
    /// [`SPLIT`].
    pub const PRIORITY_TAG: u32 = FAMILY + SPLIT;
    /// SCTP: packets that [`VARIABLE_HEADERS`] and [`VARIABLE_HEADERS_OUT`] find to be SCTP, and
    /// its [`SPLIT`]. On a node that serves no SCTP the first one has a small program in its place,
    /// and the others are empty.
    pub const SCTP: u32 = 8;
    pub const SCTP_OUT: u32 = 9;
    pub const SCTP_SPLIT: u32 = 10;
    /// TC: packets within packets of the same family, which another node may have sent for an
    /// endpoint.
    pub const OPEN: u32 = 11;
    /// Packets within packets of the same family, which another node may have sent to this one as
    /// replies for a client.
    pub const OPEN_REPLY: u32 = 12;
    pub const FAMILY: u32 = 13;
    pub const COUNT: u32 = 2 * FAMILY;
}

/// The packets of one hook by outcome: one element of `tp_counters`.
pub type OutcomeCounters = [u64; crate::outcome::OUTCOMES as usize];

/// Hooks, the index into `tp_counters`.
pub mod hook {
    pub const XDP: u32 = 0;
    pub const INGRESS: u32 = 1;
    pub const EGRESS: u32 = 2;
    /// Calls of processes: connect, sendmsg.
    pub const SOCKET: u32 = 3;
    pub const COUNT: u32 = 4;
}

/// The token bucket of one CPU for answers that the program sends itself.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct RejectBucket {
    pub tokens: u32,
    /// The time of the last refill: low half of jiffies.
    pub filled: u32,
}
