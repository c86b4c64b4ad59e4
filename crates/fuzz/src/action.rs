//! One step of a run: a packet, in terms of the flows that exist when it is sent, or a change of
//! the Services.

use std::fmt;

use fastrand::Rng;

use crate::{
    damage::Damage,
    model::STEPS,
    segment::{Protocol, Segment},
    topology::{CLIENT_PORTS, CLIENTS, Change, ENDPOINTS, SERVICES},
};

/// A packet that belongs to no Service, or is malformed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Foreign {
    /// A packet to a port that no Service has.
    OtherPort,
    /// A packet to a SNAT port, from a host without a flow.
    SnatPort,
    Echo,
    LaterFragment,
    /// A packet that is cut within the transport header.
    Truncated,
    /// A packet to another machine's MAC address.
    OtherHost,
}

/// Sender of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sender {
    /// A client, to a Service.
    Client { client: u8, port: u8, service: u8 },
    /// The endpoint of a flow, which is selected by its age.
    Endpoint { flow: u8 },
}

/// Cuts of a packet, and the order of its fragments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pieces {
    /// Size of a fragment, in units of eight bytes.
    pub size: u8,
    /// Seed of the order, and of the choice of the fragment that comes twice.
    pub order: u8,
    /// Whether the identification is that of the previous packet, as if they overlapped.
    pub again: bool,
}

/// Defect of an ICMP error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    None,
    /// The quoted packet was never sent.
    Unknown,
    /// The error goes to another address than the source of the quoted packet.
    Stranger,
    /// The quoted part is too short to identify a flow.
    Short,
    /// The error arrives at the hook of the other direction.
    WrongHook,
    /// The message is a redirect, not an error.
    NoError,
    /// The error's own TTL ends here.
    Expiring,
}

/// Moment in the processing of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Point {
    Before,
    /// The time of the packet is recorded, and no program has received it yet.
    Given,
    /// A program has received the packet, and the model has not processed it yet.
    Seen,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// A packet from a client to a Service.
    Request {
        client: u8,
        port: u8,
        service: u8,
        segment: Segment,
    },
    /// A packet from the endpoint of a flow, selected by its age; nothing if there is no flow.
    Reply {
        flow: u8,
        segment: Segment,
    },
    Foreign {
        what: Foreign,
        client: u8,
        protocol: Protocol,
    },
    /// A malformed packet.
    Malformed {
        damage: Damage,
        sender: Sender,
        segment: Segment,
    },
    /// An ICMP error about a packet of a flow.
    Error {
        /// Sender of the packet that the error quotes.
        sender: Sender,
        segment: Segment,
        kind: u8,
        quoted: u8,
        fault: Fault,
    },
    /// A packet in fragments.
    Fragments {
        sender: Sender,
        segment: Segment,
        pieces: Pieces,
    },
    /// A packet with a TTL of 0 or 1.
    Expiring {
        ttl: u8,
        sender: Sender,
        protocol: Protocol,
    },
    /// Simulated time passes.
    Wait {
        jiffies: u32,
    },
    /// Real time passes during the next packet, as on a machine with other work.
    Pause {
        milliseconds: u16,
        point: Point,
    },
    /// The agent sweeps expired flows.
    Sweep,
    /// A Service changes its endpoints, policy, drain, source ranges or affinity; or it is removed,
    /// or added.
    Service {
        service: u8,
        change: Change,
    },
    /// An endpoint of a Service takes no more new flows, and its flows that may choose again do so:
    /// a sweep marks them.
    Retire {
        service: u8,
        endpoint: u8,
    },
}

const FOREIGN: [Foreign; 6] = [
    Foreign::OtherPort,
    Foreign::SnatPort,
    Foreign::Echo,
    Foreign::LaterFragment,
    Foreign::Truncated,
    Foreign::OtherHost,
];

const FAULTS: [Fault; 6] =
    [Fault::Unknown, Fault::Stranger, Fault::Short, Fault::WrongHook, Fault::NoError, Fault::Expiring];

/// Returns the index of a client's port. Associations have fewer of them, so that more of them
/// reach their late states.
fn client_port(rng: &mut Rng, protocol: Protocol) -> u8 {
    let last = CLIENT_PORTS.len() as u8 - 1;
    match protocol {
        Protocol::Tcp | Protocol::Udp => rng.u8(..=last),
        Protocol::Sctp => [0, last][rng.usize(..2)],
    }
}

impl Sender {
    fn random(rng: &mut Rng, protocol: Protocol) -> Self {
        if rng.bool() { Self::Endpoint { flow: rng.u8(..) } } else { Self::client(rng, protocol) }
    }

    fn client(rng: &mut Rng, protocol: Protocol) -> Self {
        Self::Client {
            client: rng.u8(..CLIENTS.len() as u8),
            port: client_port(rng, protocol),
            service: rng.u8(..SERVICES.len() as u8),
        }
    }
}

impl Action {
    /// Returns a pause. Each order of magnitude is equally likely: time-outs of the programs begin
    /// at 25 jiffies, and those of a flow's port extend to 1000.
    pub fn pause(rng: &mut Rng) -> Self {
        let point = [Point::Before, Point::Given, Point::Seen][rng.usize(..3)];
        Self::Pause { milliseconds: 1 << rng.u8(..13), point }
    }

    /// Returns a random action. `favourite`: the protocol of most packets.
    pub fn random(rng: &mut Rng, favourite: Protocol) -> Self {
        let protocol = Protocol::random(rng, favourite);
        let client = rng.u8(..CLIENTS.len() as u8);
        let service = rng.u8(..SERVICES.len() as u8);
        match rng.u8(..32) {
            10 if rng.bool() => Self::Wait { jiffies: STEPS[rng.usize(..STEPS.len())] },
            10 => Self::Sweep,
            0 if rng.u8(..6) == 0 => Self::Retire { service, endpoint: rng.u8(..ENDPOINTS.len() as u8) },
            0 => Self::Service { service, change: Change::random(rng) },
            1 | 2 => Self::Foreign { what: FOREIGN[rng.usize(..FOREIGN.len())], client, protocol },
            3 | 4 => {
                let sender = Sender::random(rng, protocol);
                let reply = matches!(sender, Sender::Endpoint { .. });
                Self::Malformed {
                    damage: Damage::random(rng),
                    sender,
                    segment: Segment::random(rng, protocol, reply),
                }
            }
            5 => Self::Expiring { ttl: rng.u8(..2), sender: Sender::random(rng, protocol), protocol },
            6 | 7 => {
                let sender = Sender::random(rng, protocol);
                let reply = matches!(sender, Sender::Endpoint { .. });
                let segment = Segment::random(rng, protocol, reply);
                let fault = if rng.bool() { Fault::None } else { FAULTS[rng.usize(..FAULTS.len())] };
                Self::Error { sender, segment, kind: rng.u8(..), quoted: rng.u8(..), fault }
            }
            8 | 9 => {
                let sender = Sender::random(rng, protocol);
                let reply = matches!(sender, Sender::Endpoint { .. });
                let segment = Segment { payload: rng.u8(40..140), ..Segment::random(rng, protocol, reply) };
                let pieces = Pieces { size: rng.u8(1..7), order: rng.u8(..), again: rng.u8(..4) == 0 };
                Self::Fragments { sender, segment, pieces }
            }
            11..=20 => Self::Request {
                client,
                port: client_port(rng, protocol),
                service,
                segment: Segment::random(rng, protocol, false),
            },
            _ => Self::Reply { flow: rng.u8(..), segment: Segment::random(rng, protocol, true) },
        }
    }
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self:?}")
    }
}
