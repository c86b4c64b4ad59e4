//! Bit arrays of the prefilter.

/// Words of one bit array over all ports.
pub const PORT_WORDS: usize = 1024;

/// Bit arrays of the prefilter, read before any lookup. Ports in host order.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Prefilter {
    /// Destination ports of frontends but for ClusterIPs.
    pub frontends: [u64; PORT_WORDS],
    /// Ports used as source towards endpoints.
    pub pool: [u64; PORT_WORDS],
    /// Ports of endpoints, wherever they are.
    pub endpoints: [u64; PORT_WORDS],
    /// Hashes of ClusterIPs: [`crate::hash::address`].
    pub cluster_ips: [u64; PORT_WORDS],
    /// Prefixes of the ranges that ClusterIPs are taken from: [`crate::hash::prefix`].
    pub service_cidrs: [u64; PORT_WORDS],
}
