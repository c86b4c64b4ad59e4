//! Packets as a sender offers them, before any program has run.

use std::net::SocketAddr;

use traffic_policy_testing::{
    harness::{Device, Hook, Spot},
    packet::Packet,
};

use super::compared::Compared;
use crate::{
    action::Sender,
    model::From,
    segment::{Chunk, Segment, packet},
};

/// A packet of either side, before it is sent.
pub enum Offer {
    Request(Request),
    Reply(Reply),
}

/// A client's packet to a Service, before it is sent.
pub struct Request {
    pub client: SocketAddr,
    pub frontend: SocketAddr,
    pub service: usize,
    pub segment: Segment,
    /// The flow that it belongs to.
    pub flow: Option<usize>,
    pub numbers: (u32, u32),
    pub packet: Packet,
    /// Number of bytes of its first fragment, if only that is sent.
    pub size: Option<usize>,
}

/// An endpoint's packet, before it is sent.
pub struct Reply {
    pub flow: usize,
    pub segment: Segment,
    pub numbers: (u32, u32),
    pub packet: Packet,
    /// Number of bytes of its first fragment, if only that is sent.
    pub size: Option<usize>,
}

impl Request {
    pub fn new(compared: &Compared<'_>, client: SocketAddr, service: usize, segment: Segment) -> Self {
        let frontend = compared.model.services[service].at(compared.path.family);
        let flow = compared.model.find(segment.protocol, client, frontend);
        let numbers = compared.model.request_numbers(flow, segment);
        let packet = packet(client, frontend, segment, numbers).macs(Spot::Router.mac(), Device::Eth0.mac());
        Self { client, frontend, service, segment, flow, numbers, packet, size: None }
    }
}

impl Reply {
    pub fn new(compared: &Compared<'_>, index: usize, segment: Segment) -> Self {
        let flow = &compared.model.flows[index];
        let numbers = flow.numbers(From::Endpoint, segment);
        let packet = packet(flow.target(compared.path.family), flow.source, segment, numbers);
        let packet = match flow.endpoint.route {
            Some((device, router)) => packet.macs(router.mac(), device.mac()),
            None => packet.macs(Device::Eth0.mac(), Spot::Router.mac()),
        };
        Self { flow: index, segment, numbers, packet, size: None }
    }
}

impl Offer {
    /// Returns the packet that the sender offers; `None` if there is no such flow.
    pub fn of(compared: &Compared<'_>, sender: Sender, segment: Segment) -> Option<Self> {
        Some(match sender {
            Sender::Client { client, port, service } => {
                let client = compared.client(client, port);
                Self::Request(Request::new(compared, client, service.into(), segment))
            }
            Sender::Endpoint { flow } => {
                Self::Reply(Reply::new(compared, compared.flow(flow, segment.protocol)?, segment))
            }
        })
    }

    /// Returns its hook and device.
    pub fn place(&self, compared: &Compared<'_>) -> (Hook, Device) {
        match self {
            Self::Request(_) => (compared.path.hook, Device::Eth0),
            Self::Reply(reply) => compared.endpoint_side(&compared.model.flows[reply.flow]),
        }
    }

    pub fn packet(&self) -> &Packet {
        match self {
            Self::Request(request) => &request.packet,
            Self::Reply(reply) => &reply.packet,
        }
    }

    pub fn segment(&self) -> Segment {
        match self {
            Self::Request(request) => request.segment,
            Self::Reply(reply) => reply.segment,
        }
    }

    pub fn numbers(&self) -> (u32, u32) {
        match self {
            Self::Request(request) => request.numbers,
            Self::Reply(reply) => reply.numbers,
        }
    }

    /// Reduces the offer to a first fragment of this number of bytes, with this identification.
    pub fn cut(&mut self, identification: u16, bytes: usize) {
        let (packet, segment, size) = match self {
            Self::Request(request) => (&mut request.packet, &mut request.segment, &mut request.size),
            Self::Reply(reply) => (&mut reply.packet, &mut reply.segment, &mut reply.size),
        };
        if segment.chunk == Chunk::Init {
            segment.chunk = Chunk::BundledInit;
        }
        packet.label = identification;
        packet.dont_fragment = false;
        *size = Some(bytes);
    }
}

/// Returns a packet, or its first fragment.
pub fn piece(packet: &Packet, size: Option<usize>) -> Packet {
    match size {
        Some(size) => packet.fragments(size).swap_remove(0),
        None => packet.clone(),
    }
}
