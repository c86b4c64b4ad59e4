//! Packets of clients to Services.

use std::net::SocketAddr;

use traffic_policy_testing::{
    harness::{Device, Ran, Spot},
    packet::{Packet, difference},
};

use super::{Run, offer::piece};
use crate::{
    model::{Expected, Flow, From, NewFlow},
    segment::{Segment, end, packet},
    topology::{Endpoint, POOL},
};

/// A client's packet to a Service, before it is sent.
pub(super) struct Request {
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

impl Run<'_> {
    pub(super) fn to_service(&self, client: SocketAddr, service: usize, segment: Segment) -> Request {
        let frontend = self.model.services[service].at(self.path.family);
        let flow = self.model.find(segment.protocol, client, frontend);
        let numbers = self.model.request_numbers(flow, segment);
        let packet = packet(client, frontend, segment, numbers).macs(Spot::Router.mac(), Device::Eth0.mac());
        Request { client, frontend, service, segment, flow, numbers, packet, size: None }
    }

    pub(super) fn request(
        &mut self,
        client: SocketAddr,
        service: usize,
        segment: Segment,
    ) -> Result<(), String> {
        let request = self.to_service(client, service, segment);
        let ran = self.run(self.path.hook, Device::Eth0, &request.packet);
        let expected = self.model.request(client.ip(), request.flow, service, (segment, request.numbers));
        self.became(&request, expected, &ran)
    }

    pub(super) fn became(&mut self, request: &Request, expected: Expected, ran: &Ran) -> Result<(), String> {
        // The flow has seen the packet, whatever its fate: a sweep that found the flow over begins
        // anew.
        if let Some(index) = request.flow {
            self.model.flows[index].found_over = 0;
        }
        match expected {
            Expected::Unchanged => self.unchanged(&piece(&request.packet, request.size).bytes(), ran),
            Expected::Dropped(one, other) if [one, other].contains(&ran.outcome) => Ok(()),
            Expected::Answered(name) if [name, "dropped-rate-limited"].contains(&ran.outcome) => Ok(()),
            Expected::NotServed if !matches!(ran.outcome, "forwarded" | "delivered") => Ok(()),
            Expected::New(replaced) => self.begun(replaced, request, ran),
            Expected::Translated(index) => {
                self.requested(index, request, ran)?;
                self.went(index, request)
            }
            Expected::Either(index) => {
                let kept = self.requested(index, request, ran);
                // A new one has counted only this packet.
                if kept.is_ok() && self.request_entry(index)?.packets > 1 {
                    return self.went(index, request);
                }
                let anew = self.model.new_flow(request.client.ip(), request.service, Some(index));
                self.became(request, anew, ran).map_err(|error| match kept {
                    Ok(()) => error,
                    Err(kept) => format!("{error}, or {kept}"),
                })
            }
            expected => Err(format!("{} instead of {expected:?}", ran.outcome)),
        }
    }

    /// Records a request that was translated by an existing flow.
    fn went(&mut self, index: usize, request: &Request) -> Result<(), String> {
        let sent = piece(&request.packet, request.size);
        self.translated(index, From::Client, (request.segment, request.numbers), &sent)
    }

    /// Returns a client's packet as it must leave by a flow.
    fn translated_request(&self, sent: &Packet, flow: &Flow) -> Packet {
        let packet = sent.clone().source(end(flow.source)).destination(end(flow.target(self.path.family)));
        match flow.endpoint.way {
            Some((device, router)) => packet.macs(device.mac(), router.mac()).ttl(sent.ttl.saturating_sub(1)),
            None => packet,
        }
    }

    fn requested(&mut self, index: usize, request: &Request, ran: &Ran) -> Result<(), String> {
        self.totals.translated += 1;
        let flow = &self.model.flows[index];
        let name = if flow.endpoint.way.is_some() { "forwarded" } else { "delivered" };
        if ran.outcome != name {
            return Err(format!("{} instead of {name} by {flow:?}", ran.outcome));
        }
        let wanted = self.translated_request(&request.packet, flow);
        difference(&piece(&wanted, request.size).bytes(), &ran.frame).map_or(Ok(()), Err)
    }

    fn begun(&mut self, replaced: Option<usize>, request: &Request, ran: &Ran) -> Result<(), String> {
        let &Request { client, frontend, service, segment, numbers, .. } = request;
        let protocol = segment.protocol;
        let candidates = self.model.candidates(client.ip(), service);
        if ran.outcome == "dropped-no-snat-port" {
            let full = candidates
                .iter()
                .any(|endpoint| self.model.may_be_exhausted(protocol, client, *endpoint, replaced));
            self.model.chosen(client.ip(), service, None);
            return if full { Ok(()) } else { Err("a port was free towards every endpoint".to_owned()) };
        }
        self.totals.flows += 1;
        let entries = self.harness.flows(self.path.family);
        let made = entries.iter().find(|entry| {
            entry.is_request()
                && entry.protocol == protocol.number()
                && entry.from == client
                && entry.to == frontend
        });
        let Some(made) = made else { return Err(format!("{}: no flow was made", ran.outcome)) };
        let of = |endpoint: &&Endpoint| endpoint.spot.of(self.path.family) == made.new_to.ip();
        let Some(endpoint) = candidates.iter().find(of).copied() else {
            return Err(format!("{} is no endpoint of this Service for a new flow", made.new_to));
        };
        self.model.chosen(client.ip(), service, Some(endpoint));
        let source = made.new_from;
        let address = endpoint.way.map_or(client.ip(), |(device, _)| device.spot().of(self.path.family));
        let port_fits = match endpoint.way {
            Some(_) => POOL.contains(&source.port()),
            None => source.port() == client.port() || POOL.contains(&source.port()),
        };
        if source.ip() != address || !port_fits {
            return Err(format!("{source} is not what the endpoint should see"));
        }
        let flow = NewFlow { protocol, service, client, frontend, endpoint, source, numbers };
        self.model.begin(replaced, flow)?;
        let index = self.model.flows.len() - 1;
        self.requested(index, request, ran)?;
        self.count(index, From::Client, &piece(&request.packet, request.size));
        Ok(())
    }
}
