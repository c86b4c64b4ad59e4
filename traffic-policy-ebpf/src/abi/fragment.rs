//! Fragment records: the ports of a datagram, kept from its first fragment for the later ones,
//! which carry none.

use super::Ports;

/// The key shared by the fragments of one datagram: RFC 791 section 3.2, RFC 8200 section 4.5.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct FragmentKey<A> {
    pub source: A,
    pub destination: A,
    /// The identification field, in memory order.
    pub identification: u32,
    /// The protocol; 0 for IPv6, where a later fragment does not carry it (RFC 8200 section 4.5).
    pub protocol: u32,
}

/// The ports and the protocol, which later fragments lack.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Fragment {
    pub ports: Ports,
    /// The protocol, with [`IGNORED`] if that applies.
    pub protocol: u32,
    /// The time: CLOCK_MONOTONIC, nanoseconds.
    pub seen: u64,
}

/// A buffer for the second piece of a packet that is sent in two; its size in bytes is a power of
/// two.
pub type Piece = [u64; 256];

/// A flag in [`Fragment::protocol`]: the first fragment did not belong to its flow's conversation,
/// so the later ones do not keep the flow alive.
pub const IGNORED: u32 = 1 << 31;

/// The reassembly timeout of fragments, in nanoseconds (RFC 8200 section 4.5). Later, another
/// datagram may use the same identification.
pub const REASSEMBLY: u64 = 60_000_000_000;
