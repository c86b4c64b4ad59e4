//! Frames written byte by byte from RFC 791, 8200, 792 and 4443.

use proptest::prelude::*;
use traffic_policy_ebpf::abi::{Address4, Address6, Ports, Tuple};

/// The offsets of the bytes to change, with their new values.
pub fn damage() -> impl Strategy<Value = Vec<(usize, u8)>> {
    proptest::collection::vec((14_usize..200, any::<u8>()), 1..6)
}

pub fn damaged(mut frame: Vec<u8>, damage: &[(usize, u8)]) -> Vec<u8> {
    for (at, byte) in damage {
        if let Some(old) = frame.get_mut(*at) {
            *old = *byte;
        }
    }
    frame
}

fn ethernet(ether_type: u16) -> Vec<u8> {
    [&[2; 6][..], &[4; 6], &ether_type.to_be_bytes()].concat()
}

/// Ports, and what follows them: at least a whole header for TCP, and one with a chunk header for
/// SCTP.
fn segment(protocol: u8) -> impl Strategy<Value = Vec<u8>> {
    let least = match protocol {
        6 => 20,
        132 => 16,
        _ => 8,
    };
    proptest::collection::vec(any::<u8>(), least..60)
}

fn protocols() -> impl Strategy<Value = u8> {
    prop_oneof![Just(6_u8), Just(17_u8), Just(132_u8)]
}

fn ports(segment: &[u8]) -> Ports {
    Ports::from_wire(u32::from_ne_bytes([segment[0], segment[1], segment[2], segment[3]]))
}

#[derive(Clone, Debug)]
pub struct Ip4 {
    pub source: [u8; 4],
    pub destination: [u8; 4],
    /// The options, a multiple of four bytes.
    pub options: Vec<u8>,
    pub identification: u16,
    /// The fragment offset in units of eight bytes.
    pub offset: u16,
    pub more: bool,
    pub ttl: u8,
    pub protocol: u8,
    pub segment: Vec<u8>,
}

impl Ip4 {
    pub fn any() -> impl Strategy<Value = Self> {
        let addresses = (any::<[u8; 4]>(), any::<[u8; 4]>(), any::<u16>(), any::<u8>());
        let offset = prop_oneof![Just(0_u16), Just(0), 1_u16..0x2000];
        let rest = protocols().prop_flat_map(|protocol| (Just(protocol), segment(protocol)));
        (addresses, 0_usize..=10, offset, any::<bool>(), rest).prop_map(
            |((source, destination, identification, ttl), words, offset, more, (protocol, segment))| Self {
                source,
                destination,
                options: vec![1; words * 4],
                identification,
                offset,
                more,
                ttl,
                protocol,
                segment,
            },
        )
    }

    /// Returns the packet from the IP header on.
    pub fn packet(&self) -> Vec<u8> {
        let header = 20 + self.options.len();
        let length = (header + self.segment.len()) as u16;
        let fragment = u16::from(self.more) << 13 | self.offset;
        [
            &[0x40 | (header / 4) as u8, 0][..],
            &length.to_be_bytes(),
            &self.identification.to_be_bytes(),
            &fragment.to_be_bytes(),
            &[self.ttl, self.protocol, 0, 0],
            &self.source,
            &self.destination,
            &self.options,
            &self.segment,
        ]
        .concat()
    }

    pub fn bytes(&self) -> Vec<u8> {
        [ethernet(0x0800), self.packet()].concat()
    }

    pub fn tuple(&self, with_ports: bool) -> Tuple<Address4> {
        Tuple {
            source: Address4::from_wire(u32::from_ne_bytes(self.source)),
            destination: Address4::from_wire(u32::from_ne_bytes(self.destination)),
            ports: if with_ports { ports(&self.segment) } else { Ports::NONE },
            protocol: self.protocol.into(),
        }
    }
}

#[derive(Clone, Debug)]
pub struct Ip6 {
    pub source: [u8; 16],
    pub destination: [u8; 16],
    /// The numbers of extension headers, and the length of each in units of eight bytes, minus one.
    pub extensions: Vec<(u8, u8)>,
    /// The offset in bytes, the flag for more fragments, and the identification: behind the other
    /// extension headers.
    pub fragment: Option<(u16, bool, u32)>,
    pub protocol: u8,
    pub segment: Vec<u8>,
}

impl Ip6 {
    pub fn any() -> impl Strategy<Value = Self> {
        let number = prop_oneof![Just(0_u8), Just(43), Just(60)];
        let extensions = proptest::collection::vec((number, 0_u8..4), 0..7);
        let fragment = proptest::option::of((0_u16..40, any::<bool>(), any::<u32>()));
        let rest = protocols().prop_flat_map(|protocol| (Just(protocol), segment(protocol)));
        (any::<[u8; 16]>(), any::<[u8; 16]>(), extensions, fragment, rest).prop_map(
            |(source, destination, extensions, fragment, (protocol, segment))| Self {
                source,
                destination,
                extensions,
                // Half of them are first fragments.
                fragment: fragment
                    .map(|(offset, more, number)| (offset.saturating_sub(20) * 8, more, number)),
                protocol,
                segment,
            },
        )
    }

    pub fn packet(&self) -> Vec<u8> {
        let mut numbers: Vec<u8> = self.extensions.iter().map(|(number, _)| *number).collect();
        numbers.extend(self.fragment.map(|_| 44));
        numbers.push(self.protocol);
        let mut rest = Vec::new();
        for ((_, length), next) in self.extensions.iter().zip(&numbers[1..]) {
            rest.extend([*next, *length]);
            rest.resize(rest.len() + 6 + usize::from(*length) * 8, 0);
        }
        if let Some((offset, more, identification)) = self.fragment {
            rest.extend([self.protocol, 0]);
            rest.extend((offset | u16::from(more)).to_be_bytes());
            rest.extend(identification.to_be_bytes());
        }
        rest.extend(&self.segment);
        let length = (rest.len() as u16).to_be_bytes();
        [&[0x60, 0, 0, 0, length[0], length[1], numbers[0], 64][..], &self.source, &self.destination, &rest]
            .concat()
    }

    pub fn bytes(&self) -> Vec<u8> {
        [ethernet(0x86dd), self.packet()].concat()
    }

    pub fn tuple(&self, with_ports: bool) -> Tuple<Address6> {
        let address = |bytes: [u8; 16]| {
            let (head, tail) = (u128::from_be_bytes(bytes) >> 64, u128::from_be_bytes(bytes));
            Address6::from_wire([(head as u64).to_be(), (tail as u64).to_be()])
        };
        Tuple {
            source: address(self.source),
            destination: address(self.destination),
            ports: if with_ports { ports(&self.segment) } else { Ports::NONE },
            protocol: self.protocol.into(),
        }
    }
}

pub mod icmp {
    use super::{Ip4, Ip6, ethernet};

    /// Builds port unreachable about a packet, of which `quoted` bytes are quoted.
    pub fn about4(about: &Ip4, quoted: usize) -> Vec<u8> {
        let quote = about.packet();
        let outer = Ip4 {
            options: Vec::new(),
            offset: 0,
            more: false,
            protocol: 1,
            segment: [&[3, 3, 0, 0, 0, 0, 0, 0][..], &quote[..quote.len().min(quoted)]].concat(),
            ..about.clone()
        };
        [ethernet(0x0800), outer.packet()].concat()
    }

    /// Builds the same for IPv6.
    pub fn about6(about: &Ip6, quoted: usize) -> Vec<u8> {
        let quote = about.packet();
        let outer = Ip6 {
            extensions: Vec::new(),
            fragment: None,
            protocol: 58,
            segment: [&[1, 4, 0, 0, 0, 0, 0, 0][..], &quote[..quote.len().min(quoted)]].concat(),
            ..about.clone()
        };
        [ethernet(0x86dd), outer.packet()].concat()
    }
}
