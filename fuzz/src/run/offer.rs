//! What somebody sends, before it is sent.

use traffic_policy_testing::{
    harness::{Device, Hook},
    packet::Packet,
};

use super::{Run, replies::Reply, requests::Request};
use crate::{action::Sender, segment::Segment};

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
}

impl Run<'_> {
    /// Nothing if there is no such flow.
    pub(super) fn offer(&self, sender: Sender, segment: Segment) -> Option<Offer> {
        Some(match sender {
            Sender::Client { client, port, service } => {
                Offer::Request(self.to_service(self.client(client, port), service.into(), segment))
            }
            Sender::Endpoint { flow } => {
                Offer::Reply(self.from_endpoint(self.flow(flow, segment.tcp)?, segment))
            }
        })
    }

    /// Where it is seen.
    pub(super) fn place(&self, offer: &Offer) -> (Hook, Device) {
        match offer {
            Offer::Request(_) => (self.path.hook, Device::Eth0),
            Offer::Reply(reply) => self.endpoint_side(&self.model.flows[reply.flow]),
        }
    }
}
