//! One step of a run: a packet, in terms of the flows that exist when it comes, or a change of the Services.

use std::fmt;

use fastrand::Rng;

use crate::{
    segment::Segment,
    topology::{CLIENT_PORTS, CLIENTS, SERVICES},
};

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

impl Action {
    pub fn random(rng: &mut Rng) -> Self {
        let client = rng.u8(..CLIENTS.len() as u8);
        let service = rng.u8(..SERVICES.len() as u8);
        match rng.u8(..32) {
            0 => Self::Endpoints { service, endpoints: rng.u8(..8) },
            1 | 2 => Self::Foreign { what: FOREIGN[rng.usize(..FOREIGN.len())], client, tcp: rng.bool() },
            3..=16 => Self::Request {
                client,
                port: rng.u8(..CLIENT_PORTS.len() as u8),
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
