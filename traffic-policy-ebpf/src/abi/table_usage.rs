//! Use of the flow tables, as the packet path counts it.

/// Endpoints that [`TableUsage::no_port`] has room for.
pub const NO_PORT_PLACES: usize = 64;

/// Words that the packet path writes for new flows, in cache lines of their own.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableUsage {
    /// The next places of `tp_unassured4` and `tp_unassured6`: TCP of IPv4 and IPv6, UDP of both.
    /// They only grow; the length of a queue is taken off where they are used.
    pub unassured_next: [u64; 4],
    /// Hops handed out in each generation.
    pub hops: [u64; 2],
    /// Place in `tp_flow_dir4` and `tp_flow_dir6` where the packet path next looks for expired
    /// flows.
    pub hand: [u64; 2],
    /// Low half of jiffies when an entry found no room in a main table last.
    pub full_at: u32,
    /// The same when this node itself last sent a datagram from a frontend's address and port, or
    /// anew from a port of the pool; 0 if it never has.
    pub own_sent_at: u32,
    /// Up to where the queues have been searched for flows that make room in a full table.
    pub unassured_oldest: [u64; 4],
    pub zero: [u32; 6],
    /// Endpoints for which no source port was found, at the place of the lowest bits of their
    /// [hash][crate::hash::endpoint]: its high half, and the low half of jiffies then.
    pub no_port: [u64; NO_PORT_PLACES],
}

impl Default for TableUsage {
    fn default() -> Self {
        Self {
            unassured_next: [0; 4],
            hops: [0; 2],
            hand: [0; 2],
            full_at: 0,
            own_sent_at: 0,
            unassured_oldest: [0; 4],
            zero: [0; 6],
            no_port: [0; NO_PORT_PLACES],
        }
    }
}
