//! Malformed packets, and packets whose time to live ends here.

use traffic_policy_testing::harness::{Device, Ran};

use super::{
    compared::Compared,
    offer::{Offer, Reply, Request},
    replies, requests,
};
use crate::{
    action::Sender,
    damage::Damage,
    model::{Expected, From},
    segment::{Chunk, Flags, Protocol, Segment},
};

/// Sends a frame that is no valid packet. It goes to the stack, which judges it, and changes
/// nothing: conntrack calls it invalid.
pub fn send(
    compared: &mut Compared<'_>,
    damage: Damage,
    sender: Sender,
    segment: Segment,
) -> Result<(), String> {
    let Some(offer) = Offer::of(compared, sender, segment) else { return Ok(()) };
    let reply = matches!(offer, Offer::Reply(_));
    let Some(frame) = damage.of(offer.packet(), reply) else { return Ok(()) };
    let (hook, device) = offer.place(compared);
    compared.passes(hook, device, &frame)
}

/// Sends a packet that expires. A router forwards nothing whose TTL is 1 or less, and sends an
/// error (RFC 1812 section 5.3.1). As in netfilter, the flow has seen the packet nevertheless:
/// conntrack precedes routing. Packets for an endpoint of this node go to the stack, which
/// decrements the TTL itcompared.
pub fn send_expiring(
    compared: &mut Compared<'_>,
    ttl: u8,
    sender: Sender,
    protocol: Protocol,
) -> Result<(), String> {
    let segment = |flags, chunk| Segment::plain(protocol, flags, chunk);
    let goes_on = segment(Flags::Ack, Chunk::Data);
    match sender {
        Sender::Client { client, port, service } => {
            let (client, service) = (compared.client(client, port), usize::from(service));
            let frontend = compared.model.services[service].at(compared.path.family);
            let known = compared.model.find(protocol, client, frontend).is_some();
            let segment = if known { goes_on } else { segment(Flags::Syn, Chunk::Init) };
            let mut request = Request::new(compared, client, service, segment);
            request.packet.ttl = ttl;
            let ran = compared.run(compared.path.hook, Device::Eth0, &request.packet);
            let expected =
                compared.model.request(client.ip(), request.flow, service, (segment, request.numbers));
            let remote = match expected {
                Expected::New(_) => {
                    let candidates = compared.model.candidates(client.ip(), service);
                    candidates.iter().any(|each| each.route.is_some())
                }
                Expected::Translated(index) => compared.model.flows[index].endpoint.route.is_some(),
                _ => false,
            };
            if !remote || matches!(expected, Expected::New(_)) && !expired(&ran) {
                return requests::became(compared, &request, expected, &ran);
            }
            if let Expected::New(replaced) = expected {
                compared.model.chosen(client.ip(), service, None);
                if let Some(index) = replaced {
                    compared.model.flows[index].found_over = 0;
                }
            }
            if let Expected::Translated(index) = expected {
                compared.model.seen(index, From::Client, segment, request.numbers);
            }
            must_expire(&ran)
        }
        Sender::Endpoint { flow } => {
            let Some(index) = compared.flow(flow, protocol) else { return Ok(()) };
            let mut reply = Reply::new(compared, index, goes_on);
            reply.packet.ttl = ttl;
            let (hook, device) = compared.endpoint_side(&compared.model.flows[index]);
            let expected = compared.model.reply(index, (reply.segment, reply.numbers));
            let ran = compared.run(hook, device, &reply.packet);
            let passes = matches!(expected, Expected::Either(_)) && ran.outcome.starts_with("passed");
            if compared.model.flows[index].endpoint.route.is_none()
                || expected == Expected::Unchanged
                || passes
            {
                return replies::came_back(compared, &reply, &ran);
            }
            compared.model.seen(index, From::Endpoint, reply.segment, reply.numbers);
            must_expire(&ran)
        }
    }
}

fn expired(ran: &Ran) -> bool {
    matches!(ran.outcome, "rejected-ttl-exceeded" | "dropped-rate-limited")
}

fn must_expire(ran: &Ran) -> Result<(), String> {
    if expired(ran) { Ok(()) } else { Err(format!("{}, but its TTL ends here", ran.outcome)) }
}
