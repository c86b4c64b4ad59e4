//! Fragment records: ports of a datagram, kept from its first fragment for the later ones, which carry none.

use super::Ports;

/// Key shared by the fragments of one datagram: RFC 791 section 3.2, RFC 8200 section 4.5.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct FragmentKey<A> {
    pub source: A,
    pub destination: A,
    /// Memory order.
    pub identification: u32,
    /// 0 for IPv6, where a later fragment does not say it: RFC 8200 section 4.5.
    pub protocol: u32,
}

/// Ports and protocol, which later fragments lack.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Fragment {
    pub ports: Ports,
    pub protocol: u32,
    /// CLOCK_MONOTONIC, nanoseconds.
    pub seen: u64,
}

/// Reassembly timeout of fragments, in nanoseconds (RFC 8200 section 4.5): after that time the number may be another
/// datagram's.
pub const REASSEMBLY: u64 = 60_000_000_000;
