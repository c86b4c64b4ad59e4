//! Ports and tuples as they lie in a packet.

use super::Address;

/// A port in network byte order, as it lies in a packet. It does not convert to or from a number
/// implicitly.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct Port(u16);

impl Port {
    /// No port.
    pub const NONE: Self = Self(0);

    #[inline(always)]
    #[must_use]
    pub const fn from_host(number: u16) -> Self {
        Self(number.to_be())
    }

    #[inline(always)]
    #[must_use]
    pub const fn to_host(self) -> u16 {
        u16::from_be(self.0)
    }

    /// Takes the port from a word that was loaded from a packet, or from a structure of the kernel
    /// in the same order.
    #[inline(always)]
    #[must_use]
    pub const fn from_wire(word: u16) -> Self {
        Self(word)
    }

    /// The word to store.
    #[inline(always)]
    #[must_use]
    pub const fn wire(self) -> u16 {
        self.0
    }
}

/// Source and destination port, as one load reads them from a packet.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct Ports(u32);

impl Ports {
    pub const NONE: Self = Self(0);

    #[inline(always)]
    #[must_use]
    pub const fn new(source: Port, destination: Port) -> Self {
        let (s, d) = (source.0.to_ne_bytes(), destination.0.to_ne_bytes());
        Self(u32::from_ne_bytes([s[0], s[1], d[0], d[1]]))
    }

    /// Packs two numbers in host order.
    #[inline(always)]
    #[must_use]
    pub const fn from_host(source: u16, destination: u16) -> Self {
        Self::new(Port::from_host(source), Port::from_host(destination))
    }

    /// Takes the ports from a word that was loaded from a packet.
    #[inline(always)]
    #[must_use]
    pub const fn from_wire(word: u32) -> Self {
        Self(word)
    }

    /// The word to store.
    #[inline(always)]
    #[must_use]
    pub const fn wire(self) -> u32 {
        self.0
    }

    #[inline(always)]
    #[must_use]
    pub const fn source(self) -> Port {
        let b = self.0.to_ne_bytes();
        Port(u16::from_ne_bytes([b[0], b[1]]))
    }

    #[inline(always)]
    #[must_use]
    pub const fn destination(self) -> Port {
        let b = self.0.to_ne_bytes();
        Port(u16::from_ne_bytes([b[2], b[3]]))
    }

    /// The ports of a packet in the opposite direction.
    #[inline(always)]
    #[must_use]
    pub const fn reversed(self) -> Self {
        Self(self.0.rotate_left(16))
    }
}

pub const PROTOCOL_TCP: u32 = 6;
pub const PROTOCOL_UDP: u32 = 17;
pub const PROTOCOL_SCTP: u32 = 132;

/// The packet's own addresses and ports, by which its flow is found, as a
/// [`FlowKey`][super::FlowKey].
#[repr(C)]
#[derive(Clone, Copy, Debug, Eq, Hash, Default)]
#[expect(clippy::derived_hash_with_manual_eq, reason = "the same fields are compared, in another order")]
pub struct Tuple<A> {
    pub source: A,
    pub destination: A,
    pub ports: Ports,
    /// The IP protocol number.
    pub protocol: u32,
}

impl<A: PartialEq> PartialEq for Tuple<A> {
    /// Compares the ports first: they differ most often.
    #[inline(always)]
    fn eq(&self, other: &Self) -> bool {
        self.ports == other.ports
            && self.protocol == other.protocol
            && self.source == other.source
            && self.destination == other.destination
    }
}

impl<A: Address> Tuple<A> {
    /// The tuple of a packet in the opposite direction.
    #[inline(always)]
    #[must_use]
    pub fn reversed(&self) -> Self {
        Self {
            source: self.destination,
            destination: self.source,
            ports: self.ports.reversed(),
            protocol: self.protocol,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_lie_as_in_a_packet() {
        assert_eq!(Port::from_host(0x1f90).wire().to_ne_bytes(), [0x1f, 0x90]);
        assert_eq!(Port::from_wire(u16::from_ne_bytes([0x1f, 0x90])).to_host(), 8080);
        let ports = Ports::from_host(0x1234, 0x5678);
        assert_eq!(ports.wire().to_ne_bytes(), [0x12, 0x34, 0x56, 0x78]);
        assert_eq!((ports.source().to_host(), ports.destination().to_host()), (0x1234, 0x5678));
        assert_eq!(ports.reversed(), Ports::from_host(0x5678, 0x1234));
        assert_eq!(Ports::from_wire(ports.wire()), Ports::new(ports.source(), ports.destination()));
    }
}
