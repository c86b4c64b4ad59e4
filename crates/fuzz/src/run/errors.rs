//! ICMP errors about packets of flows, and about others.
//!
//! An error goes to the sender of the packet that it quotes, and both use the addresses that its
//! receiver knows (RFC 5508 section 4.2): the quoted packet is the one before its translation.
//! An error about a packet whose source was rewritten has its sender rewritten, too, as in
//! `nf_nat_icmp_reply_translation`. Any host can send an error, so it changes no flow (RFC 5927).

use std::net::IpAddr;

use traffic_policy_testing::{
    harness::{Device, Hook, Spot},
    lab::Family,
    packet::{Packet, Transport, difference},
};

use super::compared::Compared;
use crate::{
    action::{Fault, Sender},
    model::{Flow, From},
    segment::{Protocol, Segment, end, packet},
    topology::TARGET,
};

/// Type, code and last word of the ICMP header.
type Kind = (u8, u8, [u8; 4]);

/// Kinds of ICMPv4 errors: fragmentation needed, the unreachables, time exceeded twice, parameter
/// problem.
const KINDS4: [Kind; 6] = [
    (3, 4, [0, 0, 5, 0x14]),
    (3, 1, [0; 4]),
    (3, 3, [0; 4]),
    (11, 0, [0; 4]),
    (11, 1, [0; 4]),
    (12, 0, [9, 0, 0, 0]),
];
/// Kinds of ICMPv6 errors, with packet too big first.
const KINDS6: [Kind; 6] = [
    (2, 0, [0, 0, 5, 0x14]),
    (1, 0, [0; 4]),
    (1, 4, [0; 4]),
    (3, 0, [0; 4]),
    (3, 1, [0; 4]),
    (4, 1, [0, 0, 0, 6]),
];

/// An error as it is sent, and as it must arrive.
struct Sent {
    hook: Hook,
    device: Device,
    packet: Packet,
    name: &'static str,
    wanted: Packet,
}

/// The parts of an error: its sender, the quoted packet, and both as its receiver must see them.
struct Parts {
    from: IpAddr,
    seen: Packet,
    known_from: IpAddr,
    known: Packet,
}

/// Sends an error about a packet of a flow: of the client, or of the endpoint.
pub fn send(
    compared: &mut Compared<'_>,
    sender: Sender,
    segment: Segment,
    kind: u8,
    quoted: u8,
    fault: Fault,
) -> Result<(), String> {
    let index = match sender {
        Sender::Client { client, port, service } => {
            let frontend = compared.model.services[usize::from(service)].at(compared.path.family);
            compared.model.find(segment.protocol, compared.client(client, port), frontend)
        }
        Sender::Endpoint { flow } => compared.flow(flow, segment.protocol),
    };
    let Some(index) = index else { return Ok(()) };
    let flow = compared.model.flows[index];
    let requests = matches!(sender, Sender::Client { .. });
    let parts = if requests {
        about_request(compared, &flow, segment, kind)
    } else {
        about_reply(compared, &flow, segment, kind)
    };
    let kind = match compared.path.family {
        Family::V4 => KINDS4[usize::from(kind) % KINDS4.len()],
        Family::V6 => KINDS6[usize::from(kind) % KINDS6.len()],
    };
    let length = quote(compared, &parts.seen, segment.protocol, quoted, fault);
    let sent = errors(compared, &flow, requests, kind, &parts, length);
    let frame = faulty(compared, &flow, requests, &sent, &parts, fault);
    match (fault, requests, flow.endpoint.route) {
        (Fault::None, ..) => {
            let before = compared.watched();
            let ran = compared.run_frame(sent.hook, sent.device, frame);
            compared.totals.translated += 1;
            if ran.outcome != sent.name {
                return Err(format!("{} instead of {} by {flow:?}", ran.outcome, sent.name));
            }
            if let Some(difference) = difference(&sent.wanted.bytes(), &ran.frame) {
                return Err(difference);
            }
            compared.untouched(before)
        }
        // No error is sent about an error (RFC 1122 section 3.2.2).
        (Fault::Expiring, _, Some(_)) => {
            let before = compared.watched();
            let ran = compared.run_frame(sent.hook, sent.device, frame);
            if ran.outcome != "dropped-ttl-exceeded" {
                return Err(format!("{}, but its TTL ends here", ran.outcome));
            }
            compared.untouched(before)
        }
        // Both directions of a flow to another node arrive at the same hook.
        (Fault::Expiring, _, None) | (Fault::WrongHook, _, Some(_)) => Ok(()),
        (Fault::WrongHook, true, None) => compared.passes(compared.path.hook, Device::Eth0, &frame),
        (Fault::WrongHook, false, None) => compared.passes(Hook::Egress, Device::Eth0, &frame),
        _ => compared.passes(sent.hook, sent.device, &frame),
    }
}

/// Returns the parts of an error about a request, as the network behind this node sees it, and
/// as the client knows it.
fn about_request(compared: &Compared<'_>, flow: &Flow, segment: Segment, by: u8) -> Parts {
    let family = compared.path.family;
    let numbers = flow.numbers(From::Client, segment);
    let known = packet(flow.client, flow.frontend, segment, numbers).ttl(7);
    let seen = known.clone().source(end(flow.source)).destination(end(flow.target(family)));
    let from = match (flow.endpoint.route, by & 64 != 0) {
        (Some((_, router)), false) => router,
        // The node's own stack also sends errors about packets that it cannot deliver.
        (None, false) => Spot::NodePod0,
        _ => flow.endpoint.spot,
    };
    Parts { from: from.of(family), seen, known_from: flow.frontend.ip(), known }
}

/// Returns the parts of an error about a reply, as the network towards the client sees it, and
/// as the endpoint knows it.
fn about_reply(compared: &Compared<'_>, flow: &Flow, segment: Segment, by: u8) -> Parts {
    let family = compared.path.family;
    let numbers = flow.numbers(From::Endpoint, segment);
    let known = packet(flow.target(family), flow.source, segment, numbers).ttl(7);
    let seen = known.clone().source(end(flow.frontend)).destination(end(flow.client));
    let from = if by & 64 != 0 { flow.client.ip() } else { Spot::Router.of(family) };
    // An endpoint on this node knows its clients, and the routers in front of them.
    let known_from = if flow.endpoint.route.is_some() { flow.source.ip() } else { from };
    Parts { from, seen, known_from, known }
}

/// Returns the length of the quoted part of the packet: at least its IP header and eight bytes
/// (RFC 792).
fn quote(compared: &Compared<'_>, seen: &Packet, protocol: Protocol, quoted: u8, fault: Fault) -> usize {
    let whole = seen.bytes().len() - 14;
    let least = 8 + if compared.path.family == Family::V4 { 20 } else { 40 };
    if fault == Fault::Short {
        return usize::from(quoted) % least;
    }
    match least + usize::from(quoted) % (whole - least + 1) {
        // Half a checksum cannot be verified.
        length if protocol == Protocol::Tcp && length == least + 9 => length - 1,
        length => length,
    }
}

fn errors(
    compared: &Compared<'_>,
    flow: &Flow,
    requests: bool,
    kind: Kind,
    parts: &Parts,
    length: usize,
) -> Sent {
    let of = |from: IpAddr, about: &Packet| {
        let (kind, code, rest) = kind;
        let mut quoted = about.bytes();
        if matches!(about.transport, Transport::Sctp { .. }) {
            // Hosts check only ports and tag of a quoted packet (RFC 9260 section 10): its CRC
            // stays as it was sent.
            let sum = quoted.len() - about.payload.len() - 4..quoted.len() - about.payload.len();
            quoted[sum.clone()].copy_from_slice(&parts.seen.bytes()[sum]);
        }
        Packet::new(from, about.source, Transport::Icmp { kind, code, rest }).payload(&quoted[14..][..length])
    };
    let (packet, wanted) = (of(parts.from, &parts.seen), of(parts.known_from, &parts.known));
    let client = (Spot::Router.mac(), Device::Eth0.mac());
    match (requests, flow.endpoint.route) {
        (true, Some((device, router))) => Sent {
            hook: compared.path.hook,
            device,
            packet: packet.macs(router.mac(), device.mac()),
            name: "replied-icmp-error",
            wanted: wanted.macs(client.1, client.0).ttl(63),
        },
        (true, None) => Sent {
            hook: Hook::Egress,
            device: Device::Eth0,
            packet,
            name: "replied-local-icmp-error",
            wanted,
        },
        (false, Some((device, router))) => Sent {
            hook: compared.path.hook,
            device: Device::Eth0,
            packet: packet.macs(client.0, client.1),
            name: "forwarded-icmp-error",
            wanted: wanted.macs(device.mac(), router.mac()).ttl(63),
        },
        (false, None) => Sent {
            hook: compared.path.hook,
            device: Device::Eth0,
            packet: packet.macs(client.0, client.1),
            name: "delivered-icmp-error",
            wanted: wanted.macs(client.0, client.1),
        },
    }
}

/// Returns the frame with its fault.
fn faulty(
    compared: &Compared<'_>,
    flow: &Flow,
    requests: bool,
    sent: &Sent,
    parts: &Parts,
    fault: Fault,
) -> Vec<u8> {
    let mut packet = sent.packet.clone();
    match fault {
        Fault::None | Fault::Short | Fault::WrongHook => {}
        Fault::Expiring => packet.ttl = 1,
        // The quoted packet was never sent: it goes to another port of the endpoint, or comes
        // from another one.
        Fault::Unknown => {
            let target = (flow.endpoint.spot.of(compared.path.family), TARGET + 1);
            let seen = parts.seen.clone();
            let seen = if requests {
                seen.destination(target)
            } else {
                seen.source((flow.frontend.ip(), TARGET + 1))
            };
            packet.payload = seen.bytes()[14..][..packet.payload.len()].to_vec();
        }
        // The destination is a host that did not send the packet.
        Fault::Stranger => packet.destination = Spot::NodeSlim0.of(compared.path.family),
        // A redirect reports nothing about the packet itcompared.
        Fault::NoError => {
            let kind = if compared.path.family == Family::V4 { 5 } else { 137 };
            packet.transport = Transport::Icmp { kind, code: 0, rest: [0; 4] };
        }
    }
    packet.bytes()
}
