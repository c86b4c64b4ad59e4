//! Packets of endpoints back to clients.

use traffic_policy_testing::{
    harness::{Device, Ran, Spot},
    packet::{Packet, difference},
};

use super::{Run, offer::piece};
use crate::{
    model::{Expected, Flow, From},
    segment::{Segment, end, packet},
};

/// An endpoint's packet, before it is sent.
pub(super) struct Reply {
    pub flow: usize,
    pub segment: Segment,
    pub numbers: (u32, u32),
    pub packet: Packet,
    /// Number of bytes of its first fragment, if only that is sent.
    pub size: Option<usize>,
}

impl Run<'_> {
    pub(super) fn endpoint_reply(&self, index: usize, segment: Segment) -> Reply {
        let flow = &self.model.flows[index];
        let numbers = flow.numbers(From::Endpoint, segment);
        let packet = packet(flow.target(self.path.family), flow.source, segment, numbers);
        let packet = match flow.endpoint.way {
            Some((device, router)) => packet.macs(router.mac(), device.mac()),
            None => packet.macs(Device::Eth0.mac(), Spot::Router.mac()),
        };
        Reply { flow: index, segment, numbers, packet, size: None }
    }

    pub(super) fn reply(&mut self, index: usize, segment: Segment) -> Result<(), String> {
        let reply = self.endpoint_reply(index, segment);
        let (hook, device) = self.endpoint_side(&self.model.flows[index]);
        let ran = self.run(hook, device, &reply.packet);
        self.came_back(&reply, &ran)
    }

    pub(super) fn came_back(&mut self, reply: &Reply, ran: &Ran) -> Result<(), String> {
        let expected = self.model.reply(reply.flow, (reply.segment, reply.numbers));
        let sent = piece(&reply.packet, reply.size);
        if expected == Expected::Unchanged
            || matches!(expected, Expected::Either(_)) && ran.outcome.starts_with("passed")
        {
            return self.unchanged(&sent.bytes(), ran);
        }
        self.totals.translated += 1;
        let flow = self.model.flows[reply.flow];
        let name = if flow.endpoint.way.is_some() { "replied" } else { "replied-local" };
        if ran.outcome != name {
            return Err(format!("{} instead of {name} by {flow:?}", ran.outcome));
        }
        let wanted = piece(&Self::translated_reply(&reply.packet, &flow), reply.size);
        if let Some(difference) = difference(&wanted.bytes(), &ran.frame) {
            return Err(difference);
        }
        self.translated(reply.flow, From::Endpoint, (reply.segment, reply.numbers), &sent)
    }

    /// Returns an endpoint's packet as it must leave by a flow.
    fn translated_reply(sent: &Packet, flow: &Flow) -> Packet {
        let packet = sent.clone().source(end(flow.frontend)).destination(end(flow.client));
        match flow.endpoint.way {
            Some(_) => packet.macs(Device::Eth0.mac(), Spot::Router.mac()).ttl(sent.ttl.saturating_sub(1)),
            None => packet,
        }
    }
}
