//! MTUs that routes of the node name.

/// The destination of a route of the node's main table, in a longest-prefix trie. `W` is 1 word for
/// IPv4, 4 for IPv6, in memory order.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RoutePrefix<const W: usize> {
    pub address: [u32; W],
}

/// The key of a look-up in that trie. The key proper begins with `bits`: a [`RoutePrefix`] behind
/// its length in bits.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct RouteQuery<A> {
    /// Padding, so that no bytes lie between length and address.
    pub zero: u32,
    pub bits: u32,
    pub address: A,
}
