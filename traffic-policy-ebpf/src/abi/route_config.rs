//! Configuration about routes and next hops that changes while the agent runs.

/// Words that the agent writes, and with which every established packet compares its next hop. They
/// are part of the [prefilter][super::Prefilter], whose first cache line a packet needs anyway.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct RouteConfig {
    /// The route epoch in the lower half (never 0), the hop generation (0 or 1) in the upper. It is
    /// raised when a stored route may be wrong.
    pub route: u32,
    /// The hop epoch, raised when a stored MAC may be wrong.
    pub hop_epoch: u32,
    /// The jiffies after which a hop is resolved again.
    pub hop_max_age: u32,
    /// The families of which some route names an MTU (`tp_route_mtus4`, `tp_route_mtus6`), as bits:
    /// 1 for IPv4 and 2 for IPv6.
    pub route_mtus: u32,
}
