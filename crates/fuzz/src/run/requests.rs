//! Packets of clients to Services.

use std::net::SocketAddr;

use traffic_policy_testing::{
    harness::{Device, Ran},
    packet::{Packet, difference},
};

use super::{
    compared::Compared,
    offer::{Request, piece},
};
use crate::{
    model::{Expected, Flow, From, NewFlow},
    segment::{Segment, end},
    topology::{Endpoint, SNAT_PORTS},
};

/// Sends a client's packet to a Service.
pub fn send(
    compared: &mut Compared<'_>,
    client: SocketAddr,
    service: usize,
    segment: Segment,
) -> Result<(), String> {
    let request = Request::new(compared, client, service, segment);
    let ran = compared.run(compared.path.hook, Device::Eth0, &request.packet);
    let expected = compared.model.request(client.ip(), request.flow, service, (segment, request.numbers));
    became(compared, &request, expected, &ran)
}

/// Compares what became of a client's packet with what the model demands. A flow that it has begun
/// is taken over by the model.
pub fn became(
    compared: &mut Compared<'_>,
    request: &Request,
    expected: Expected,
    ran: &Ran,
) -> Result<(), String> {
    // The flow has seen the packet, whatever its fate: a sweep that found the flow over begins
    // anew.
    if let Some(index) = request.flow {
        compared.model.flows[index].found_over = 0;
    }
    match expected {
        Expected::Unchanged => compared.unchanged(&piece(&request.packet, request.size).bytes(), ran),
        Expected::Dropped(one, other) if [one, other].contains(&ran.outcome) => Ok(()),
        Expected::Answered(name) if [name, "dropped-rate-limited"].contains(&ran.outcome) => Ok(()),
        Expected::NotServed if !matches!(ran.outcome, "forwarded" | "delivered") => Ok(()),
        Expected::New(replaced) => begun(compared, replaced, request, ran),
        Expected::Translated(index) => {
            requested(compared, index, request, ran)?;
            went(compared, index, request)
        }
        Expected::Either(index) => {
            let kept = requested(compared, index, request, ran);
            // A new one has counted only this packet.
            if kept.is_ok() && compared.request_entry(index)?.packets > 1 {
                return went(compared, index, request);
            }
            let anew = compared.model.new_flow(request.client.ip(), request.service, Some(index));
            became(compared, request, anew, ran).map_err(|error| match kept {
                Ok(()) => error,
                Err(kept) => format!("{error}, or {kept}"),
            })
        }
        expected => Err(format!("{} instead of {expected:?}", ran.outcome)),
    }
}

/// Records a request that was translated by an existing flow.
fn went(compared: &mut Compared<'_>, index: usize, request: &Request) -> Result<(), String> {
    let sent = piece(&request.packet, request.size);
    compared.translated(index, From::Client, (request.segment, request.numbers), &sent)
}

/// Returns a client's packet as it must leave by a flow.
fn translated_request(compared: &Compared<'_>, sent: &Packet, flow: &Flow) -> Packet {
    let packet = sent.clone().source(end(flow.source)).destination(end(flow.target(compared.path.family)));
    match flow.endpoint.route {
        Some((device, router)) => packet.macs(device.mac(), router.mac()).ttl(sent.ttl.saturating_sub(1)),
        None => packet,
    }
}

fn requested(compared: &mut Compared<'_>, index: usize, request: &Request, ran: &Ran) -> Result<(), String> {
    compared.totals.translated += 1;
    let flow = &compared.model.flows[index];
    let name = if flow.endpoint.route.is_some() { "forwarded" } else { "delivered" };
    if ran.outcome != name {
        return Err(format!("{} instead of {name} by {flow:?}", ran.outcome));
    }
    let wanted = translated_request(compared, &request.packet, flow);
    difference(&piece(&wanted, request.size).bytes(), &ran.frame).map_or(Ok(()), Err)
}

fn begun(
    compared: &mut Compared<'_>,
    replaced: Option<usize>,
    request: &Request,
    ran: &Ran,
) -> Result<(), String> {
    let &Request { client, frontend, service, segment, numbers, .. } = request;
    let protocol = segment.protocol;
    let candidates = compared.model.candidates(client.ip(), service);
    if ran.outcome == "dropped-no-snat-port" {
        let full = candidates
            .iter()
            .any(|endpoint| compared.model.may_be_exhausted(protocol, client, *endpoint, replaced));
        compared.model.chosen(client.ip(), service, None);
        return if full { Ok(()) } else { Err("a port was free towards every endpoint".to_owned()) };
    }
    compared.totals.flows += 1;
    let entries = compared.harness.flows(compared.path.family);
    let made = entries.iter().find(|entry| {
        entry.is_request()
            && entry.protocol == protocol.number()
            && entry.from == client
            && entry.to == frontend
    });
    let Some(made) = made else { return Err(format!("{}: no flow was made", ran.outcome)) };
    let of = |endpoint: &&Endpoint| endpoint.spot.of(compared.path.family) == made.new_to.ip();
    let Some(endpoint) = candidates.iter().find(of).copied() else {
        return Err(format!("{} is no endpoint of this Service for a new flow", made.new_to));
    };
    compared.model.chosen(client.ip(), service, Some(endpoint));
    let source = made.new_from;
    let address = endpoint.route.map_or(client.ip(), |(device, _)| device.spot().of(compared.path.family));
    let port_fits = match endpoint.route {
        Some(_) => SNAT_PORTS.contains(&source.port()),
        None => source.port() == client.port() || SNAT_PORTS.contains(&source.port()),
    };
    if source.ip() != address || !port_fits {
        return Err(format!("{source} is not what the endpoint should see"));
    }
    let flow = NewFlow { protocol, service, client, frontend, endpoint, source, numbers };
    compared.model.begin(replaced, flow)?;
    let index = compared.model.flows.len() - 1;
    requested(compared, index, request, ran)?;
    compared.count(index, From::Client, &piece(&request.packet, request.size));
    Ok(())
}
