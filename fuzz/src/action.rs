//! One step of a run: a packet, in terms of the flows that exist when it comes, or a change of the Services.

use std::fmt;

use fastrand::Rng;

use crate::topology::{CLIENT_PORTS, CLIENTS, SERVICES};

/// A sequence or acknowledgement number, relative to the one that the sender would use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Number {
    Right,
    /// Off by so much: within what a middlebox must take for a retransmission or a lost segment.
    Near(i16),
    /// Farther off than any window: half the space of numbers away, and this much more.
    Far(u16),
}

/// Which flags a segment has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flags {
    Syn,
    SynAck,
    Ack,
    FinAck,
    /// As an end sends it that gives up.
    RstAck,
    /// As an end sends it that knows no such connection.
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

/// A packet that belongs to no Service, or is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Foreign {
    /// To a port that no Service has.
    OtherPort,
    /// To a port of the pool, from somebody who was not asked.
    PoolPort,
    Echo,
    LaterFragment,
    /// Ends within the transport header.
    Truncated,
    /// To another machine's MAC address.
    OtherHost,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// From a client to a Service.
    Request {
        client: u8,
        port: u8,
        service: u8,
        segment: Segment,
    },
    /// From the endpoint of a flow, by its age; of nothing if there is none.
    Reply {
        flow: u8,
        segment: Segment,
    },
    Foreign {
        what: Foreign,
        client: u8,
        tcp: bool,
    },
    /// A Service gets other endpoints.
    Endpoints {
        service: u8,
        endpoints: u8,
    },
}

const FOREIGN: [Foreign; 6] = [
    Foreign::OtherPort,
    Foreign::PoolPort,
    Foreign::Echo,
    Foreign::LaterFragment,
    Foreign::Truncated,
    Foreign::OtherHost,
];

fn number(rng: &mut Rng) -> Number {
    match rng.u8(..20) {
        0 => Number::Near(rng.i16(..)),
        1 | 2 => Number::Far(rng.u16(..)),
        _ => Number::Right,
    }
}

impl Segment {
    /// `reply`: of an endpoint.
    fn random(rng: &mut Rng, reply: bool) -> Self {
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
        // A handshake carries none, unless it is TCP fast open.
        let payload = if matches!(flags, Flags::Syn | Flags::SynAck) { 0 } else { payload };
        Self { tcp: rng.u8(..4) > 0, flags, sequence: number(rng), acknowledgement: number(rng), payload }
    }
}

impl Action {
    pub fn random(rng: &mut Rng) -> Self {
        let client = rng.u8(..CLIENTS.len() as u8);
        let service = rng.u8(..SERVICES.len() as u8);
        match rng.u8(..32) {
            0 => Self::Endpoints { service, endpoints: rng.u8(..8) },
            1 | 2 => Self::Foreign { what: FOREIGN[rng.usize(..FOREIGN.len())], client, tcp: rng.bool() },
            3..=16 => Self::Request {
                client,
                port: rng.u8(..CLIENT_PORTS),
                service,
                segment: Segment::random(rng, false),
            },
            _ => Self::Reply { flow: rng.u8(..), segment: Segment::random(rng, true) },
        }
    }
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self:?}")
    }
}
