//! Ports and tuples as they lie in a packet.

use super::Address;

/// Source and destination port, two 16-bit words in memory order, as one load takes them from a packet.
#[inline(always)]
pub const fn ports(source: u16, destination: u16) -> u32 {
    u32::from_ne_bytes({
        let (s, d) = (source.to_ne_bytes(), destination.to_ne_bytes());
        [s[0], s[1], d[0], d[1]]
    })
}

/// Source port of a pair of ports, in memory order.
#[inline(always)]
pub const fn source_port(ports: u32) -> u16 {
    let b = ports.to_ne_bytes();
    u16::from_ne_bytes([b[0], b[1]])
}

/// Destination port of a pair of ports, in memory order.
#[inline(always)]
pub const fn destination_port(ports: u32) -> u16 {
    let b = ports.to_ne_bytes();
    u16::from_ne_bytes([b[2], b[3]])
}

pub const PROTOCOL_TCP: u32 = 6;
pub const PROTOCOL_UDP: u32 = 17;

/// The packet's own addresses and ports: what finds its flow, as a [`FlowKey`][super::FlowKey].
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct Tuple<A> {
    pub source: A,
    pub destination: A,
    /// See [`ports`].
    pub ports: u32,
    /// IP protocol number.
    pub protocol: u32,
}

impl<A: Address> Tuple<A> {
    /// The tuple of a packet in the opposite direction.
    #[inline(always)]
    #[must_use]
    pub fn reversed(&self) -> Self {
        Self {
            source: self.destination,
            destination: self.source,
            ports: self.ports.rotate_left(16),
            protocol: self.protocol,
        }
    }
}
