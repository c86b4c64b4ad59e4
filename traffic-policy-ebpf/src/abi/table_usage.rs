//! Use of the flow tables, as the packet path counts it.

/// Words that the packet path writes for new flows, in cache lines of their own.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct TableUsage {
    /// Flows with SNAT ever created.
    pub snat_created: u64,
    /// Flows ever put into `tp_pending`.
    pub pending_created: u64,
    /// TCP flows in the main tables that are not assured: IPv4, IPv6.
    pub unassured: [u64; 2],
    /// Hops handed out in each generation.
    pub hops: [u64; 2],
    /// UDP flows in the main tables that are not assured: IPv4, IPv6.
    pub unassured_udp: [u64; 2],
    /// Place in `tp_flow_dir4` and `tp_flow_dir6` where the packet path next looks for expired flows.
    pub hand: [u64; 2],
    /// Low half of jiffies when an entry found no room in a main table last.
    pub full_at: u32,
    /// The same when this node itself last sent a datagram from a frontend's address and port, or anew from a port of the pool; 0 if it
    /// never has.
    pub own_sent_at: u32,
    pub zero: [u32; 10],
}
