//! A TCP segment or datagram in terms of the conversation to which it belongs, or pretends to
//! belong.

use std::net::{IpAddr, SocketAddr};

use fastrand::Rng;
use traffic_policy_testing::packet::{Packet, flag};

/// A sequence or acknowledgement number, relative to the one that the sender would use.
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

/// A TCP segment, or a datagram with as much payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    pub tcp: bool,
    pub flags: Flags,
    pub sequence: Number,
    pub acknowledgement: Number,
    pub payload: u8,
}

fn number(rng: &mut Rng) -> Number {
    match rng.u8(..20) {
        0 => Number::Near(rng.i16(..)),
        1 | 2 => Number::Far(rng.u16(..)),
        _ => Number::Right,
    }
}

impl Segment {
    /// Returns a random segment. `reply`: it is an endpoint's.
    pub fn random(rng: &mut Rng, reply: bool) -> Self {
        let flags = match (rng.u8(..16), reply) {
            (0..=3, false) => Flags::Syn,
            (0..=3, true) => Flags::SynAck,
            (4, false) => Flags::SynAck,
            (4, true) => Flags::Syn,
            (5 | 6, _) => Flags::FinAck,
            (7, _) => Flags::RstAck,
            (8, _) => Flags::Rst,
            _ => Flags::Ack,
        };
        let payload = if rng.bool() { 0 } else { rng.u8(1..100) };
        // A handshake carries no payload, unless it is TCP fast open.
        let payload = if matches!(flags, Flags::Syn | Flags::SynAck) { 0 } else { payload };
        Self { tcp: rng.u8(..4) > 0, flags, sequence: number(rng), acknowledgement: number(rng), payload }
    }
}

pub fn end(address: SocketAddr) -> (IpAddr, u16) {
    (address.ip(), address.port())
}

pub fn bits(flags: Flags) -> u8 {
    match flags {
        Flags::Syn => flag::SYN,
        Flags::SynAck => flag::SYN | flag::ACK,
        Flags::Ack => flag::ACK,
        Flags::FinAck => flag::FIN | flag::ACK,
        Flags::RstAck => flag::RST | flag::ACK,
        Flags::Rst => flag::RST,
    }
}

/// Builds the packet of a segment or datagram.
pub fn packet(
    from: SocketAddr,
    to: SocketAddr,
    segment: Segment,
    (sequence, acknowledgement): (u32, u32),
) -> Packet {
    let payload = vec![0x5a; segment.payload.into()];
    let packet = if segment.tcp {
        Packet::tcp(end(from), end(to), bits(segment.flags)).numbers(sequence, acknowledgement)
    } else {
        Packet::udp(end(from), end(to))
    };
    packet.payload(&payload)
}
