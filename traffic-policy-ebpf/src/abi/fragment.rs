//! Fragment records: ports of a datagram, kept from its first fragment for the later ones, which
//! carry none.

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
    /// With [`IGNORED`], if so.
    pub protocol: u32,
    /// CLOCK_MONOTONIC, nanoseconds.
    pub seen: u64,
}

/// Room for the second piece of a packet that is sent in two; a power of two of bytes.
pub type Piece = [u64; 256];

/// In [`Fragment::protocol`]: the first fragment was no part of its flow's conversation, so the
/// later ones do not keep the flow alive.
pub const IGNORED: u32 = 1 << 31;

/// Reassembly timeout of fragments, in nanoseconds (RFC 8200 section 4.5): after that time the
/// number may be another datagram's.
pub const REASSEMBLY: u64 = 60_000_000_000;
