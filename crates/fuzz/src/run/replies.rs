//! Packets of endpoints back to clients.

use traffic_policy_testing::{
    harness::{Device, Ran, Spot},
    packet::{Packet, difference},
};

use super::{
    compared::Compared,
    offer::{Reply, piece},
};
use crate::{
    model::{Expected, Flow, From},
    segment::{Segment, end},
};

/// Sends a packet of a flow's endpoint.
pub fn send(compared: &mut Compared<'_>, index: usize, segment: Segment) -> Result<(), String> {
    let reply = Reply::new(compared, index, segment);
    let (hook, device) = compared.endpoint_side(&compared.model.flows[index]);
    let ran = compared.run(hook, device, &reply.packet);
    came_back(compared, &reply, &ran)
}

/// Compares what became of an endpoint's packet with what the model demands.
pub fn came_back(compared: &mut Compared<'_>, reply: &Reply, ran: &Ran) -> Result<(), String> {
    let expected = compared.model.reply(reply.flow, (reply.segment, reply.numbers));
    let sent = piece(&reply.packet, reply.size);
    if expected == Expected::Unchanged
        || matches!(expected, Expected::Either(_)) && ran.outcome.starts_with("passed")
    {
        return compared.unchanged(&sent.bytes(), ran);
    }
    compared.totals.translated += 1;
    let flow = compared.model.flows[reply.flow];
    let name = if flow.endpoint.route.is_some() { "replied" } else { "replied-local" };
    if ran.outcome != name {
        return Err(format!("{} instead of {name} by {flow:?}", ran.outcome));
    }
    let wanted = piece(&translated_reply(&reply.packet, &flow), reply.size);
    if let Some(difference) = difference(&wanted.bytes(), &ran.frame) {
        return Err(difference);
    }
    compared.translated(reply.flow, From::Endpoint, (reply.segment, reply.numbers), &sent)
}

/// Returns an endpoint's packet as it must leave by a flow.
fn translated_reply(sent: &Packet, flow: &Flow) -> Packet {
    let packet = sent.clone().source(end(flow.frontend)).destination(end(flow.client));
    match flow.endpoint.route {
        Some(_) => packet.macs(Device::Eth0.mac(), Spot::Router.mac()).ttl(sent.ttl.saturating_sub(1)),
        None => packet,
    }
}
