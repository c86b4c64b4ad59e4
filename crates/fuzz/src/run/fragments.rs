//! Datagrams and segments in fragments.
//!
//! The first fragment has the ports, and is handled as the whole packet would be. The others belong
//! to the flow of the last first fragment of their addresses and identification (RFC 791 section
//! 3.2; RFC 8200 section 4.5, where the protocol is no part of it), and pass while there is none:
//! they are not queued here. A first fragment of TCP without the whole fixed header counts as none
//! (RFC 1858), and so does one of SCTP without the header of its first chunk. The first fragment of
//! an SCTP packet whose ports would change is dropped: the checksum covers the others as well.

use std::{
    collections::HashMap,
    net::{IpAddr, SocketAddr},
};

use fastrand::Rng;
use traffic_policy_testing::{
    harness::{Device, Hook, Spot},
    lab::Family,
    packet::{Packet, Tcp, Transport, difference},
};

use super::{
    compared::Compared,
    offer::{Offer, piece},
    replies, requests,
};
use crate::{
    action::{Pieces, Sender},
    model::{Expected, Flow, From},
    segment::{Chunk, Flags, Protocol, Segment},
    topology::TARGET,
};

/// The key that the fragments of one packet share: addresses, identification, and, for IPv4, the
/// protocol.
type Key = (IpAddr, IpAddr, u16, Option<Protocol>);

/// The packet that later fragments belong to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Record {
    protocol: Protocol,
    source: u16,
    destination: u16,
    /// Whether the first fragment belongs to the association for certain: the others keep it alive
    /// with it.
    belongs: bool,
}

/// Fragments of a run.
pub struct Fragments {
    /// Identification of the last packet in fragments: an odd number, which [`super::foreign`] does
    /// not use.
    identification: u16,
    records: HashMap<Key, Record>,
}

impl Fragments {
    /// Returns the state before the first packet.
    pub fn new() -> Self {
        Self { identification: 1, records: HashMap::new() }
    }

    /// Sends a packet in fragments.
    pub fn send(
        &mut self,
        compared: &mut Compared<'_>,
        sender: Sender,
        segment: Segment,
        pieces: Pieces,
    ) -> Result<(), String> {
        let handshake = matches!(segment.flags, Flags::Syn | Flags::SynAck);
        // Only whole segments end a connection.
        let flags = if handshake { segment.flags } else { Flags::Ack };
        let chunk = if segment.chunk == Chunk::Init { Chunk::Init } else { Chunk::Data };
        let payload = if segment.protocol == Protocol::Tcp && handshake { 0 } else { segment.payload };
        let segment = Segment { flags, chunk, payload, ..segment };
        let Some(mut offer) = Offer::of(compared, sender, segment) else { return Ok(()) };
        if !pieces.again {
            self.identification += 2;
        }
        let size = usize::from(pieces.size) * 8;
        offer.cut(self.identification, size);
        let whole = offer.packet().clone();
        let count = whole.fragments(size).len();
        if count < 2 {
            return Ok(());
        }
        let mut rng = Rng::with_seed(pieces.order.into());
        let mut order: Vec<usize> = (0..count).collect();
        if rng.bool() {
            rng.shuffle(&mut order);
        }
        // The first fragment is not repeated: it would be a packet of its own.
        order.push(rng.usize(1..count));
        let at = offer.place(compared);
        for number in order {
            if number == 0 {
                self.first(compared, &offer, at, size)?;
            } else {
                self.later(
                    compared,
                    segment.protocol,
                    at,
                    &whole,
                    &whole.fragments(size).swap_remove(number),
                )?;
            }
        }
        Ok(())
    }

    /// Sends the first fragment, which is judged like the packet itself.
    fn first(
        &mut self,
        compared: &mut Compared<'_>,
        offer: &Offer,
        (hook, device): (Hook, Device),
        size: usize,
    ) -> Result<(), String> {
        let whole = offer.packet();
        let first = piece(whole, Some(size));
        let protocol = offer.segment().protocol;
        let least = match protocol {
            Protocol::Tcp => 20,
            Protocol::Udp => 8,
            Protocol::Sctp => 16,
        };
        if size < least {
            return compared.passes(hook, device, &first.bytes());
        }
        let ran = compared.run(hook, device, &first);
        let (from, expected) = match offer {
            Offer::Request(request) => {
                let (client, packet) = (request.client.ip(), (request.segment, request.numbers));
                let expected = compared.model.request(client, request.flow, request.service, packet);
                (From::Client, expected)
            }
            Offer::Reply(reply) => {
                (From::Endpoint, compared.model.reply(reply.flow, (reply.segment, reply.numbers)))
            }
        };
        if let Expected::Translated(index) = expected
            && is_cut(&compared.model.flows[index], offer)
        {
            compared.model.seen(index, from, offer.segment(), offer.numbers());
            return if ran.outcome == "dropped-sctp-fragment" {
                Ok(())
            } else {
                Err(format!("{}, but its checksum covers other fragments", ran.outcome))
            };
        }
        match offer {
            Offer::Request(request) => requests::became(compared, request, expected, &ran)?,
            Offer::Reply(reply) => replies::came_back(compared, reply, &ran)?,
        }
        if matches!(ran.outcome, "forwarded" | "delivered" | "replied" | "replied-local") {
            let (source, destination) = ports(whole);
            let now = compared.model.now();
            let belongs = matches!(expected, Expected::Translated(index)
                if compared.model.flows[index].belonged == now);
            let key = key(compared.path.family, whole, protocol);
            self.records.insert(key, Record { protocol, source, destination, belongs });
        }
        Ok(())
    }

    fn later(
        &mut self,
        compared: &mut Compared<'_>,
        protocol: Protocol,
        (hook, device): (Hook, Device),
        whole: &Packet,
        sent: &Packet,
    ) -> Result<(), String> {
        let Some(record) = self.records.get(&key(compared.path.family, whole, protocol)).copied() else {
            return compared.passes(hook, device, &sent.bytes());
        };
        let from = SocketAddr::new(whole.source, record.source);
        let to = SocketAddr::new(whole.destination, record.destination);
        let family = compared.path.family;
        let of_endpoint =
            |flow: &Flow| (flow.protocol, flow.target(family), flow.source) == (record.protocol, from, to);
        let request = compared.model.find(record.protocol, from, to).map(|index| (index, From::Client));
        let reply = || Some((compared.model.flows.iter().position(of_endpoint)?, From::Endpoint));
        let Some((index, side)) = request.or_else(reply) else {
            let clock = compared.model.clock;
            let left = compared.model.stale.iter_mut().find(|each| each.is(record.protocol, to, from));
            if let Some(stale) = left {
                // The entry that the flow has left may still be found.
                (stale.last, stale.found_over) = (clock, 0);
                compared.run(hook, device, sent);
                return Ok(());
            }
            return compared.passes(hook, device, &sent.bytes());
        };
        let ran = compared.run(hook, device, sent);
        compared.totals.translated += 1;
        let flow = compared.model.flows[index];
        let (name, wanted) = translated(&flow, side, sent, family);
        if ran.outcome != name {
            return Err(format!("{} instead of {name} by {flow:?}", ran.outcome));
        }
        if let Some(difference) = difference(&wanted.bytes(), &ran.frame) {
            return Err(difference);
        }
        if record.protocol == Protocol::Sctp {
            compared.model.flows[index].belongs = record.belongs;
        }
        compared.count(index, side, sent);
        Ok(())
    }
}

/// Returns a fragment without a transport header as it must leave by a flow: with other addresses.
fn translated(flow: &Flow, side: From, sent: &Packet, family: Family) -> (&'static str, Packet) {
    let target = flow.target(family);
    let (source, destination) = match side {
        From::Client => (flow.source, target),
        From::Endpoint => (flow.frontend, flow.client),
    };
    let wanted = Packet { source: source.ip(), destination: destination.ip(), ..sent.clone() };
    let sent_on = |wanted: Packet, from, to| wanted.macs(from, to).ttl(sent.ttl.saturating_sub(1));
    match (side, flow.endpoint.route) {
        (From::Client, Some((device, router))) => ("forwarded", sent_on(wanted, device.mac(), router.mac())),
        (From::Client, None) => ("delivered", wanted),
        (From::Endpoint, Some(_)) => ("replied", sent_on(wanted, Device::Eth0.mac(), Spot::Router.mac())),
        (From::Endpoint, None) => ("replied-local", wanted),
    }
}

fn ports(packet: &Packet) -> (u16, u16) {
    match packet.transport {
        Transport::Tcp(Tcp { source, destination, .. })
        | Transport::Udp { source, destination, .. }
        | Transport::Sctp { source, destination, .. } => (source, destination),
        _ => (0, 0),
    }
}

/// Whether this node changes the ports of a packet of a flow, and with them a checksum that covers
/// the whole packet, of which only the first fragment is here.
fn is_cut(flow: &Flow, offer: &Offer) -> bool {
    let ends = ((flow.client.port(), flow.frontend.port()), (flow.source.port(), TARGET));
    offer.segment().protocol == Protocol::Sctp && ends.0 != ends.1
}

fn key(family: Family, whole: &Packet, protocol: Protocol) -> Key {
    (whole.source, whole.destination, whole.label, (family == Family::V4).then_some(protocol))
}
