//! Packets of direct forwarding as they arrive, and as they are sent.

use std::net::{IpAddr, SocketAddr};

use anyhow::{Context, Result, bail};
use etherparse::{IpNumber, Ipv4Header, Ipv4Options, PacketBuilder};
use traffic_policy_bench_ebpf::CILIUM_OPTION;
use traffic_policy_ebpf::{
    abi::{self, Address4, Address6, BY_MAC, FlowKey, GUE_PORT, Port, REPLY_THROUGH_FRONT, identification},
    checksum,
};
use traffic_policy_testing::netlink::Mac;

use super::{
    super::{
        fixture::{Addresses, MAC, ROUTER_MAC, V4, V6},
        flows::{Flow, Kind, expected, frames, request_key},
        frame::{Frame, packed, unpacked},
        loaded::{Loaded, Method},
        service,
    },
    Dispatch,
};

/// TTL or hop limit of an outer packet.
const TTL: u8 = 64;
/// The MAC address of a router that is no node.
const OTHER_ROUTER: Mac = [2, 0, 0, 0, 0, 3];
/// Offsets in a frame: the identification and the checksum of an IPv4 header, and the last byte of
/// the flow label of IPv6.
const IDENTIFICATION: usize = 18;
const HEADER_SUM: usize = 24;
const LABEL: usize = 17;

fn own(flow: &Flow) -> Addresses {
    if flow.client.is_ipv4() { V4 } else { V6 }
}

/// Returns packets of flows as they arrive in front.
///
/// # Errors
/// The addresses of a flow are of different families.
pub fn arriving(flows: &[Flow], kind: Kind, dispatch: Dispatch) -> Result<Vec<Frame>> {
    let mut frames = frames(flows, kind)?;
    if dispatch == Dispatch::ByMac {
        // What comes from a node's MAC address does not go on to another.
        for frame in &mut frames {
            *frame = packed(&between(&unpacked(frame), [OTHER_ROUTER, MAC]));
        }
    }
    Ok(frames)
}

/// Returns a packet of a flow, `inner`, as the node in front sends it, by an open flow of the
/// tables.
///
/// # Errors
/// The flow is missing, or of two families.
pub fn sent(loaded: &Loaded, inner: &[u8], flow: &Flow, kind: Kind, dispatch: Dispatch) -> Result<Vec<u8>> {
    match dispatch {
        Dispatch::Ip => sent_within(inner, flow),
        Dispatch::Tunnel => Ok(numbered(sent_within(inner, flow)?)),
        Dispatch::Udp => {
            let ends = (flow.node.ip(), flow.endpoint.ip());
            within_udp(inner, [MAC, ROUTER_MAC], ends, port(loaded, flow)?)
        }
        Dispatch::ByMac => expected(&Flow { node: flow.client, endpoint: flow.frontend, ..*flow }, kind),
    }
}

/// Returns the same packet as the floor sends it.
///
/// # Errors
/// The addresses are of different families.
pub fn sent_by_floor(inner: &[u8], flow: &Flow, dispatch: Dispatch) -> Result<Vec<u8>> {
    match dispatch {
        Dispatch::Ip | Dispatch::Tunnel => sent_within(inner, flow),
        Dispatch::Udp => {
            within_udp(inner, [MAC, ROUTER_MAC], (flow.node.ip(), flow.endpoint.ip()), service::FLOOR_PORT)
        }
        Dispatch::ByMac => Ok(sent_on(inner)),
    }
}

/// Returns a frame that the node sends on to the router, otherwise unchanged.
#[must_use]
pub fn sent_on(frame: &[u8]) -> Vec<u8> {
    between(frame, [MAC, ROUTER_MAC])
}

/// Returns a frame within an outer packet, as another node, the router, sends it to the first
/// endpoint.
///
/// # Errors
/// The addresses are of different families.
pub fn arriving_within(inner: &[u8], flow: &Flow, dispatch: Dispatch) -> Result<Vec<u8>> {
    let (macs, ends) = ([ROUTER_MAC, MAC], (own(flow).router, flow.endpoint.ip()));
    match dispatch {
        Dispatch::Ip => within(inner, macs, ends),
        Dispatch::Udp => within_udp(inner, macs, ends, service::FLOOR_PORT),
        Dispatch::Tunnel => Ok(numbered(within(inner, macs, ends)?)),
        Dispatch::ByMac => Ok(inner.to_vec()),
    }
}

/// Returns a translated reply within an outer packet, as the endpoint's node sends it to the one in
/// front, and as it arrives there.
///
/// # Errors
/// The addresses are of different families.
pub fn reply_within(reply: &[u8], flow: &Flow) -> Result<[Vec<u8>; 2]> {
    let Addresses { node, router, .. } = own(flow);
    Ok([within(reply, [MAC, ROUTER_MAC], (node, router))?, within(reply, [ROUTER_MAC, MAC], (router, node))?])
}

fn sent_within(inner: &[u8], flow: &Flow) -> Result<Vec<u8>> {
    within(inner, [MAC, ROUTER_MAC], (flow.node.ip(), flow.endpoint.ip()))
}

fn within(inner: &[u8], macs: [Mac; 2], ends: (IpAddr, IpAddr)) -> Result<Vec<u8>> {
    let protocol = if ends.0.is_ipv4() { IpNumber::IPV4 } else { IpNumber::IPV6 };
    outer(macs, ends, protocol, &inner[14..])
}

/// Puts a frame into an outer packet within UDP without a checksum.
fn within_udp(inner: &[u8], macs: [Mac; 2], ends: (IpAddr, IpAddr), port: u16) -> Result<Vec<u8>> {
    let inner = &inner[14..];
    let length = u16::try_from(inner.len() + 8)?;
    let header = [port, GUE_PORT.to_host(), length, 0].map(u16::to_be_bytes);
    outer(macs, ends, IpNumber::UDP, &[header.as_flattened(), inner].concat())
}

fn outer(
    [from, to]: [Mac; 2],
    ends: (IpAddr, IpAddr),
    protocol: IpNumber,
    payload: &[u8],
) -> Result<Vec<u8>> {
    let ethernet = PacketBuilder::ethernet2(from, to);
    let step = match ends {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            ethernet.ipv4(source.octets(), destination.octets(), TTL)
        }
        (IpAddr::V6(source), IpAddr::V6(destination)) => {
            ethernet.ipv6(source.octets(), destination.octets(), TTL)
        }
        (source, destination) => bail!("{source} and {destination} are of two families"),
    };
    let mut bytes = Vec::with_capacity(step.size(payload.len()));
    step.write(&mut bytes, protocol, payload)?;
    Ok(bytes)
}

/// Notes in an outer packet that replies are to come back.
fn numbered(mut frame: Vec<u8>) -> Vec<u8> {
    if frame[14] >> 4 == 6 {
        frame[LABEL] |= REPLY_THROUGH_FRONT as u8;
        return frame;
    }
    let word = |frame: &[u8], at: usize| u16::from_ne_bytes([frame[at], frame[at + 1]]);
    let former = word(&frame, IDENTIFICATION);
    let now = identification(REPLY_THROUGH_FRONT).to_be_bytes();
    frame[IDENTIFICATION..][..2].copy_from_slice(&now);
    let delta = checksum::delta(former.into(), word(&frame, IDENTIFICATION).into());
    let sum = checksum::update(word(&frame, HEADER_SUM), delta);
    frame[HEADER_SUM..][..2].copy_from_slice(&sum.to_ne_bytes());
    frame
}

/// Returns a frame with other MAC addresses.
fn between(frame: &[u8], [from, to]: [Mac; 2]) -> Vec<u8> {
    [&to[..], &from[..], &frame[12..]].concat()
}

/// Returns the source port of what a flow's packets travel in, by the tables.
fn port(loaded: &Loaded, flow: &Flow) -> Result<u16> {
    let word = if flow.client.is_ipv4() {
        let key = FlowKey::of(&request_key::<Address4>(flow)?);
        let entry: abi::Flow<Address4> = loaded.tables.v4.flows.get(&key, 0).context("a flow is missing")?;
        entry.port_delta
    } else {
        let key = FlowKey::of(&request_key::<Address6>(flow)?);
        let entry: abi::Flow<Address6> = loaded.tables.v6.flows.get(&key, 0).context("a flow is missing")?;
        entry.port_delta
    };
    Ok(Port::from_wire(word & !BY_MAC).to_host())
}

/// Returns the frame that is right for a `packet` of a flow which a method has sent: that for the
/// endpoint which it names.
///
/// # Errors
/// It is right for none of the endpoints.
pub fn sent_by(
    loaded: &Loaded,
    method: Method,
    frame: &[u8],
    packet: &[u8],
    flow: &Flow,
    kind: Kind,
) -> Result<Vec<u8>> {
    let own = own(flow);
    for ip in (0..loaded.setup.endpoints).map(|i| service::endpoint(own, i)) {
        let right = match method {
            Method::Katran => {
                let ends = (SocketAddr::new(own.node, 0), SocketAddr::new(ip, 0));
                sent_within(frame, &Flow { node: ends.0, endpoint: ends.1, ..*flow })?
            }
            Method::Cilium => by_cilium(flow, ip, kind)?,
        };
        if right == packet {
            return Ok(right);
        }
    }
    bail!("{method:?}'s packet is right for no endpoint: {packet:02x?}")
}

/// Returns a packet of a flow over IPv4 as Cilium's method sends it to an endpoint: a SYN has an
/// option with the Service's address and port.
fn by_cilium(flow: &Flow, endpoint: IpAddr, kind: Kind) -> Result<Vec<u8>> {
    let endpoint = SocketAddr::new(endpoint, super::TARGET_PORT);
    let plain = expected(&Flow { node: flow.client, endpoint, ..*flow }, kind)?;
    if kind != Kind::Opening {
        return Ok(plain);
    }
    let IpAddr::V4(frontend) = flow.frontend.ip() else { bail!("{} is not IPv4", flow.frontend) };
    let (ethernet, rest) = plain.split_at(14);
    let (header, payload) = rest.split_at(20);
    let mut header = Ipv4Header::from_slice(header)?.0;
    let option = CILIUM_OPTION | u32::from(flow.frontend.port());
    let option = [option.to_be_bytes(), frontend.octets()].concat();
    header.options = Ipv4Options::try_from(&option[..])?;
    header.total_len += u16::try_from(option.len())?;
    header.header_checksum = header.calc_header_checksum();
    let mut bytes = ethernet.to_vec();
    header.write(&mut bytes)?;
    bytes.extend(payload);
    Ok(bytes)
}

/// Verifies that a packet is a frame as the floor sends it to one of the endpoints.
///
/// # Errors
/// It is not.
pub fn check_sent_by_floor(
    loaded: &Loaded,
    frame: &[u8],
    packet: &[u8],
    flow: &Flow,
    dispatch: Dispatch,
) -> Result<()> {
    let own = own(flow);
    for ip in (0..loaded.setup.endpoints).map(|i| service::endpoint(own, i)) {
        let flow = Flow { node: SocketAddr::new(own.node, 0), endpoint: SocketAddr::new(ip, 0), ..*flow };
        if sent_by_floor(frame, &flow, dispatch)? == packet {
            return Ok(());
        }
    }
    bail!("the floor's packet goes to no endpoint: {packet:02x?}")
}
