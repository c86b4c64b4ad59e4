//! Malformed packets that a stack must discard, each with the rule that requires it.

use fastrand::Rng;
use traffic_policy_testing::packet::{Packet, Transport};

/// A defect of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Damage {
    /// The EtherType is this one, of another protocol or a tag.
    EtherType(u16),
    /// The version of its IP header is wrong.
    Version(u8),
    /// The IPv4 header length is this number of words: fewer than five (RFC 791), or more than the
    /// packet has.
    HeaderWords(u8),
    /// The length field exceeds the frame by this number of bytes and one more.
    Longer(u8),
    /// The length field is shorter than the headers by at least one byte.
    Shorter(u8),
    /// The frame is truncated.
    Cut(u8),
    /// The TCP data offset is this number of words: fewer than five (RFC 9293), or more than the
    /// segment has.
    DataOffset(u8),
    /// The port of the Service or of the endpoint is 0, which is reserved (RFC 6335 section 6).
    NoPort,
}

/// EtherTypes: ARP, IPv4, IPv6, two kinds of VLAN tags, MPLS, a length of IEEE 802.3.
const ETHER_TYPES: [u16; 7] = [0x0806, 0x0800, 0x86dd, 0x8100, 0x88a8, 0x8847, 0x0040];

const ETHERNET: usize = 14;

impl Damage {
    pub fn random(rng: &mut Rng) -> Self {
        match rng.u8(..8) {
            0 => Self::EtherType(ETHER_TYPES[rng.usize(..ETHER_TYPES.len())]),
            1 => Self::Version(rng.u8(..16)),
            2 => Self::HeaderWords(rng.u8(..16)),
            3 => Self::Longer(rng.u8(..)),
            4 => Self::Shorter(rng.u8(..)),
            5 => Self::Cut(rng.u8(..)),
            // The offset may exceed the segment: see the undecided cases in
            // `tests/tests/reference.rs`.
            6 => Self::DataOffset(rng.u8(..16)),
            _ => Self::NoPort,
        }
    }

    /// Returns the damaged frame, if the damage applies to it. `reply`: the packet is an
    /// endpoint's.
    pub fn of(self, packet: &Packet, reply: bool) -> Option<Vec<u8>> {
        let mut frame = packet.bytes();
        let v4 = packet.source.is_ipv4();
        let tcp = matches!(packet.transport, Transport::Tcp(_));
        let ip = if v4 { 20 } else { 40 };
        let least = match packet.transport {
            Transport::Tcp(_) => 20,
            // The common header, and that of a chunk.
            Transport::Sctp { .. } => 16,
            _ => 8,
        };
        let l4 = ETHERNET + ip;
        // The start and the extent of the length field.
        let (length_at, counted) = if v4 { (16, 0) } else { (18, ip) };
        let long = frame.len() - ETHERNET - counted;
        match self {
            Self::EtherType(other) if other.to_be_bytes() == frame[12..14] => return None,
            // The kernel's test run takes no frame that ends within the IP header.
            Self::EtherType(0x86dd) if frame.len() < ETHERNET + 40 => return None,
            Self::EtherType(other) => frame[12..14].copy_from_slice(&other.to_be_bytes()),
            Self::Version(other) if other == frame[ETHERNET] >> 4 => return None,
            Self::Version(other) => frame[ETHERNET] = other << 4 | frame[ETHERNET] & 15,
            // A longer header may be valid: options, and then data that is read as the transport
            // header.
            Self::HeaderWords(words) if !v4 || words >= 5 && usize::from(words) * 4 < long => return None,
            Self::HeaderWords(words) => frame[ETHERNET] = 4 << 4 | words,
            Self::Longer(more) => {
                let length = long as u16 + 1 + u16::from(more);
                frame[length_at..length_at + 2].copy_from_slice(&length.to_be_bytes());
            }
            Self::Shorter(length) => {
                let length = u16::from(length) % (ip - counted + least) as u16;
                frame[length_at..length_at + 2].copy_from_slice(&length.to_be_bytes());
            }
            Self::Cut(at) => frame.truncate(l4 + usize::from(at) % (frame.len() - l4)),
            Self::DataOffset(words) => {
                let segment = frame.len() - l4;
                if !tcp || words >= 5 && usize::from(words) * 4 <= segment {
                    return None;
                }
                frame[l4 + 12] = words << 4 | frame[l4 + 12] & 15;
            }
            Self::NoPort => {
                let port = if reply { l4 } else { l4 + 2 };
                frame[port..port + 2].fill(0);
            }
        }
        Some(frame)
    }
}
