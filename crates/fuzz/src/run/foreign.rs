//! Packets that belong to no Service.

use std::net::SocketAddr;

use traffic_policy_testing::{
    harness::{Device, Spot},
    lab::Family,
    packet::{Packet, Transport},
};

use super::compared::Compared;
use crate::{
    action::Foreign,
    segment::{Chunk, Flags, Protocol, Segment, packet},
    topology::SNAT_PORTS,
};

/// Sends such a packet, which passes.
pub fn send(
    compared: &mut Compared<'_>,
    what: Foreign,
    client: SocketAddr,
    protocol: Protocol,
) -> Result<(), String> {
    let family = compared.path.family;
    let to = |port| SocketAddr::new(Spot::Node.of(family), port);
    let segment = Segment { payload: 40, ..Segment::plain(protocol, Flags::Syn, Chunk::Init) };
    // A SYN, or an INIT without a verification tag.
    let numbers = if protocol == Protocol::Sctp { (0, 1) } else { (1, 0) };
    // No client of this run uses this port.
    let stranger = SocketAddr::new(client.ip(), 1234);
    let make =
        |port| packet(stranger, to(port), segment, numbers).macs(Spot::Router.mac(), Device::Eth0.mac());
    let node_port = compared.model.services[0].port;
    let sent = match what {
        Foreign::OtherPort => make(22),
        Foreign::SnatPort => make(SNAT_PORTS[0]),
        Foreign::Echo => {
            let kind = if family == Family::V4 { 8 } else { 128 };
            let echo = Transport::Icmp { kind, code: 0, rest: [0, 1, 0, 2] };
            Packet::new(stranger.ip(), to(0).ip(), echo).macs(Spot::Router.mac(), Device::Eth0.mac())
        }
        Foreign::LaterFragment => {
            let Some(fragment) = make(node_port).fragments(24).pop() else {
                return Err("a packet without fragments".to_owned());
            };
            fragment
        }
        Foreign::OtherHost => make(node_port).with(|packet| packet.to = [2, 9, 9, 9, 9, 9]),
        Foreign::Truncated => {
            let mut frame = make(node_port).bytes();
            frame.truncate(14 + if family == Family::V4 { 20 } else { 40 } + 4);
            return compared.passes(compared.path.hook, Device::Eth0, &frame);
        }
    };
    compared.passes(compared.path.hook, Device::Eth0, &sent.bytes())
}
