//! The use of the flow tables, as the packet path counts it.

/// The number of endpoints that [`TableUsage::no_port`] has room for.
pub const NO_PORT_PLACES: usize = 64;

/// Words that the packet path writes for new flows, in cache lines of their own.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableUsage {
    /// The next places of `tp_unassured4` and `tp_unassured6`: TCP of IPv4 and IPv6, UDP of both.
    /// They only grow; users reduce them modulo the length of a queue.
    pub unassured_next: [u64; 4],
    /// Hops handed out in each generation.
    pub hops: [u64; 2],
    /// The place in `tp_flow_dir4` and `tp_flow_dir6` where the packet path next looks for expired
    /// flows.
    pub hand: [u64; 2],
    /// The low half of jiffies when an entry last found no room in a main table.
    pub full_at: u32,
    /// The low half of jiffies when this node itself last sent a datagram from a frontend's address
    /// and port, or a datagram or the beginning or end of a connection from a port of the SNAT port
    /// range; 0 if it never has.
    pub own_sent_at: u32,
    /// The places up to which the queues have been searched for flows to remove from a full table.
    pub unassured_oldest: [u64; 4],
    pub zero: [u32; 6],
    /// The endpoints for which no source port was found, at the place given by the lowest bits of
    /// their [hash][crate::hash::endpoint]: the high half of the hash, and the low half of jiffies
    /// at that time.
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
