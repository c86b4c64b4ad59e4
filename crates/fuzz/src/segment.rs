//! A packet of TCP, UDP or SCTP in terms of the conversation to which it belongs, or pretends to
//! belong.

use std::net::{IpAddr, SocketAddr};

use fastrand::Rng;
use traffic_policy_testing::packet::{Packet, chunk, flag};

/// A protocol that Services serve.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Protocol {
    Tcp,
    Udp,
    Sctp,
}

/// A sequence or acknowledgement number or an initiate tag, relative to the one that the sender
/// would use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Number {
    Right,
    /// Off by this much, which a middlebox must take for a retransmission or a lost segment.
    Near(i16),
    /// Farther off than any window: half the space of numbers away, and this much more.
    Far(u16),
}

/// Flags of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flags {
    Syn,
    SynAck,
    Ack,
    FinAck,
    /// RST and ACK, as an end sends it that gives up.
    RstAck,
    /// RST alone, as an end sends it that knows no such connection.
    Rst,
}

/// First chunk of an SCTP packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Chunk {
    Init,
    /// An INIT that is not alone in its packet, or not whole: no host accepts it (RFC 9260 section
    /// 4.3).
    BundledInit,
    InitAck,
    CookieEcho,
    CookieAck,
    Data,
    Sack,
    Heartbeat,
    HeartbeatAck,
    Shutdown,
    ShutdownAck,
    ShutdownComplete,
    Abort,
}

/// Verification tag of an SCTP packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tag {
    /// The one that the receiver has chosen; of an INIT, 0.
    Right,
    /// One that no host has chosen.
    Other,
    Zero,
    /// The sender's own, without the flag that says so.
    Own,
    /// The sender's own, with the flag T (RFC 9260 section 8.5.1).
    Reflected,
    /// The receiver's, with the flag T.
    Flagged,
}

/// A TCP segment, a datagram, or an SCTP packet. The fields of other protocols than its own are
/// ignored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    pub protocol: Protocol,
    /// TCP.
    pub flags: Flags,
    /// TCP; of an INIT or INIT ACK, the initiate tag.
    pub sequence: Number,
    /// TCP.
    pub acknowledgement: Number,
    /// SCTP, as is the tag.
    pub chunk: Chunk,
    pub tag: Tag,
    pub payload: u8,
}

/// Parameters of an INIT or INIT ACK after its tag: the window, ten streams each way, the first
/// number.
const OPENING: [u8; 12] = [0, 1, 0, 0, 0, 10, 0, 10, 1, 2, 3, 4];

impl Protocol {
    /// Returns a protocol: most often the `favourite` one.
    pub fn random(rng: &mut Rng, favourite: Self) -> Self {
        match rng.u8(..12) {
            0 => Self::Tcp,
            1 => Self::Udp,
            2 => Self::Sctp,
            _ => favourite,
        }
    }

    /// Returns the favourite of a sequence. Half of the sequences are about TCP, which has the most
    /// rules.
    pub fn favourite(rng: &mut Rng) -> Self {
        [Self::Tcp, Self::Tcp, Self::Udp, Self::Sctp][rng.usize(..4)]
    }

    /// Returns its number in IP headers.
    pub fn number(self) -> u8 {
        match self {
            Self::Tcp => 6,
            Self::Udp => 17,
            Self::Sctp => 132,
        }
    }
}

fn number(rng: &mut Rng) -> Number {
    match rng.u8(..20) {
        0 => Number::Near(rng.i16(..)),
        1 | 2 => Number::Far(rng.u16(..)),
        _ => Number::Right,
    }
}

fn flags(rng: &mut Rng, reply: bool) -> Flags {
    match (rng.u8(..16), reply) {
        (0..=3, false) => Flags::Syn,
        (0..=3, true) => Flags::SynAck,
        (4, false) => Flags::SynAck,
        (4, true) => Flags::Syn,
        (5 | 6, _) => Flags::FinAck,
        (7, _) => Flags::RstAck,
        (8, _) => Flags::Rst,
        _ => Flags::Ack,
    }
}

impl Chunk {
    fn random(rng: &mut Rng, reply: bool) -> Self {
        match (rng.u8(..24), reply) {
            (0..=5, false) => Self::Init,
            (0..=3, true) => Self::InitAck,
            (4 | 5, true) => Self::CookieAck,
            (6..=8, false) => Self::CookieEcho,
            (6..=8, true) => Self::CookieAck,
            (9, false) => Self::InitAck,
            (9, true) => Self::Init,
            (10, false) => Self::CookieAck,
            (10, true) => Self::CookieEcho,
            (11, _) => Self::BundledInit,
            (12, _) => Self::Sack,
            (13, _) => Self::Heartbeat,
            (14, _) => Self::HeartbeatAck,
            (15, _) => Self::Shutdown,
            (16, _) => Self::ShutdownAck,
            (17, _) => Self::ShutdownComplete,
            (18, _) => Self::Abort,
            _ => Self::Data,
        }
    }
}

impl Tag {
    fn random(rng: &mut Rng) -> Self {
        match rng.u8(..24) {
            0 => Self::Other,
            1 => Self::Zero,
            2 => Self::Own,
            3 | 4 => Self::Reflected,
            5 => Self::Flagged,
            _ => Self::Right,
        }
    }
}

impl Segment {
    /// Returns a random packet of a protocol. `reply`: it is an endpoint's.
    pub fn random(rng: &mut Rng, protocol: Protocol, reply: bool) -> Self {
        let flags = flags(rng, reply);
        let payload = if rng.bool() { 0 } else { rng.u8(1..100) };
        // A handshake carries no payload, unless it is TCP fast open.
        let handshake = protocol != Protocol::Sctp && matches!(flags, Flags::Syn | Flags::SynAck);
        Self {
            protocol,
            flags,
            sequence: number(rng),
            acknowledgement: number(rng),
            chunk: Chunk::random(rng, reply),
            tag: Tag::random(rng),
            payload: if handshake { 0 } else { payload },
        }
    }

    /// Returns a packet without any deviation: of these flags, or of this chunk.
    pub fn plain(protocol: Protocol, flags: Flags, chunk: Chunk) -> Self {
        Self {
            protocol,
            flags,
            sequence: Number::Right,
            acknowledgement: Number::Right,
            chunk,
            tag: Tag::Right,
            payload: 0,
        }
    }

    /// Returns the chunks of an SCTP packet.
    fn chunks(&self, initiate: u32) -> Vec<u8> {
        let filling = vec![0x5a; self.payload.into()];
        let reflected = u8::from(matches!(self.tag, Tag::Reflected | Tag::Flagged));
        let of = |kind, flags, fixed: &[u8]| encode(kind, flags | reflected, &[fixed, &filling].concat());
        let opening = [&initiate.to_be_bytes()[..], &OPENING].concat();
        match self.chunk {
            Chunk::Init => of(chunk::INIT, 0, &opening),
            Chunk::BundledInit => {
                [encode(chunk::INIT, reflected, &opening), of(chunk::DATA, 3, &[0; 12])].concat()
            }
            Chunk::InitAck => of(chunk::INIT_ACK, 0, &opening),
            Chunk::CookieEcho => of(chunk::COOKIE_ECHO, 0, &[7; 40]),
            Chunk::CookieAck => encode(chunk::COOKIE_ACK, reflected, &[]),
            Chunk::Data => of(chunk::DATA, 2, &[0; 12]),
            Chunk::Sack => encode(chunk::SACK, reflected, &[0; 12]),
            Chunk::Heartbeat => of(chunk::HEARTBEAT, 0, &[0, 1, 0, 4]),
            Chunk::HeartbeatAck => of(chunk::HEARTBEAT_ACK, 0, &[0, 1, 0, 4]),
            Chunk::Shutdown => encode(chunk::SHUTDOWN, reflected, &[0; 4]),
            Chunk::ShutdownAck => encode(chunk::SHUTDOWN_ACK, reflected, &[]),
            Chunk::ShutdownComplete => encode(chunk::SHUTDOWN_COMPLETE, reflected, &[]),
            Chunk::Abort => of(chunk::ABORT, 0, &[]),
        }
    }
}

/// Returns a chunk, padded to four bytes.
fn encode(kind: u8, flags: u8, value: &[u8]) -> Vec<u8> {
    let length = (4 + value.len() as u16).to_be_bytes();
    let mut bytes = [&[kind, flags], &length[..], value].concat();
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

pub fn end(address: SocketAddr) -> (IpAddr, u16) {
    (address.ip(), address.port())
}

fn bits(flags: Flags) -> u8 {
    match flags {
        Flags::Syn => flag::SYN,
        Flags::SynAck => flag::SYN | flag::ACK,
        Flags::Ack => flag::ACK,
        Flags::FinAck => flag::FIN | flag::ACK,
        Flags::RstAck => flag::RST | flag::ACK,
        Flags::Rst => flag::RST,
    }
}

/// Builds the packet of a segment. `numbers`: the sequence and acknowledgement number of TCP; the
/// verification tag and the initiate tag of SCTP.
pub fn packet(from: SocketAddr, to: SocketAddr, segment: Segment, numbers: (u32, u32)) -> Packet {
    let packet = match segment.protocol {
        Protocol::Tcp => Packet::tcp(end(from), end(to), bits(segment.flags)).numbers(numbers.0, numbers.1),
        Protocol::Udp => Packet::udp(end(from), end(to)),
        Protocol::Sctp => return Packet::sctp(end(from), end(to), numbers.0, &segment.chunks(numbers.1)),
    };
    packet.payload(&vec![0x5a; segment.payload.into()])
}
