//! Malformed packets, and packets whose time to live ends here.

use traffic_policy_testing::harness::{Device, Ran};

use super::{Run, offer::Offer};
use crate::{
    action::Sender,
    damage::Damage,
    model::{Expected, From},
    segment::{Chunk, Flags, Protocol, Segment},
};

impl Run<'_> {
    /// Sends a frame that is no valid packet. It goes to the stack, which judges it, and changes
    /// nothing: conntrack calls it invalid.
    pub(super) fn malformed(
        &mut self,
        damage: Damage,
        sender: Sender,
        segment: Segment,
    ) -> Result<(), String> {
        let Some(offer) = self.offer(sender, segment) else { return Ok(()) };
        let reply = matches!(offer, Offer::Reply(_));
        let Some(frame) = damage.of(offer.packet(), reply) else { return Ok(()) };
        let (hook, device) = self.place(&offer);
        self.passes(hook, device, &frame)
    }

    /// Sends a packet that expires. A router forwards nothing whose TTL is 1 or less, and sends an
    /// error (RFC 1812 section 5.3.1). As in netfilter, the flow has seen the packet nevertheless:
    /// conntrack precedes routing. Packets for an endpoint of this node go to the stack, which
    /// decrements the TTL itself.
    pub(super) fn expiring(&mut self, ttl: u8, sender: Sender, protocol: Protocol) -> Result<(), String> {
        let segment = |flags, chunk| Segment::plain(protocol, flags, chunk);
        let goes_on = segment(Flags::Ack, Chunk::Data);
        match sender {
            Sender::Client { client, port, service } => {
                let (client, service) = (self.client(client, port), usize::from(service));
                let frontend = self.model.services[service].at(self.path.family);
                let known = self.model.find(protocol, client, frontend).is_some();
                let segment = if known { goes_on } else { segment(Flags::Syn, Chunk::Init) };
                let mut request = self.to_service(client, service, segment);
                request.packet.ttl = ttl;
                let ran = self.run(self.path.hook, Device::Eth0, &request.packet);
                let expected =
                    self.model.request(client.ip(), request.flow, service, (segment, request.numbers));
                let remote = match expected {
                    Expected::New(_) => {
                        let candidates = self.model.candidates(client.ip(), service);
                        candidates.iter().any(|each| each.way.is_some())
                    }
                    Expected::Translated(index) => self.model.flows[index].endpoint.way.is_some(),
                    _ => false,
                };
                if !remote || matches!(expected, Expected::New(_)) && !expired(&ran) {
                    return self.became(&request, expected, &ran);
                }
                if let Expected::New(replaced) = expected {
                    self.model.chosen(client.ip(), service, None);
                    if let Some(index) = replaced {
                        self.model.flows[index].found_over = 0;
                    }
                }
                if let Expected::Translated(index) = expected {
                    self.model.seen(index, From::Client, segment, request.numbers);
                }
                must_expire(&ran)
            }
            Sender::Endpoint { flow } => {
                let Some(index) = self.flow(flow, protocol) else { return Ok(()) };
                let mut reply = self.endpoint_reply(index, goes_on);
                reply.packet.ttl = ttl;
                let (hook, device) = self.endpoint_side(&self.model.flows[index]);
                let expected = self.model.reply(index, (reply.segment, reply.numbers));
                let ran = self.run(hook, device, &reply.packet);
                let passes = matches!(expected, Expected::Either(_)) && ran.outcome.starts_with("passed");
                if self.model.flows[index].endpoint.way.is_none() || expected == Expected::Unchanged || passes
                {
                    return self.came_back(&reply, &ran);
                }
                self.model.seen(index, From::Endpoint, reply.segment, reply.numbers);
                must_expire(&ran)
            }
        }
    }
}

fn expired(ran: &Ran) -> bool {
    matches!(ran.outcome, "rejected-ttl-exceeded" | "dropped-rate-limited")
}

fn must_expire(ran: &Ran) -> Result<(), String> {
    if expired(ran) { Ok(()) } else { Err(format!("{}, but its TTL ends here", ran.outcome)) }
}
