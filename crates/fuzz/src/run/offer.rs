//! Packets as a sender offers them, before any program has run.

use traffic_policy_testing::{
    harness::{Device, Hook},
    packet::Packet,
};

use super::{Run, replies::Reply, requests::Request};
use crate::{
    action::Sender,
    segment::{Chunk, Segment},
};

pub(super) enum Offer {
    Request(Request),
    Reply(Reply),
}

impl Offer {
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
pub(super) fn piece(packet: &Packet, size: Option<usize>) -> Packet {
    match size {
        Some(size) => packet.fragments(size).swap_remove(0),
        None => packet.clone(),
    }
}

impl Run<'_> {
    /// Returns the packet that the sender offers; `None` if there is no such flow.
    pub(super) fn offer(&self, sender: Sender, segment: Segment) -> Option<Offer> {
        Some(match sender {
            Sender::Client { client, port, service } => {
                Offer::Request(self.to_service(self.client(client, port), service.into(), segment))
            }
            Sender::Endpoint { flow } => {
                Offer::Reply(self.endpoint_reply(self.flow(flow, segment.protocol)?, segment))
            }
        })
    }

    /// Returns the hook and device of an offered packet.
    pub(super) fn place(&self, offer: &Offer) -> (Hook, Device) {
        match offer {
            Offer::Request(_) => (self.path.hook, Device::Eth0),
            Offer::Reply(reply) => self.endpoint_side(&self.model.flows[reply.flow]),
        }
    }
}
