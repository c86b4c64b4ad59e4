//! The construction of the first packet of a flow as a frame.

use std::net::{IpAddr, SocketAddr};

use anyhow::{Context as _, Result, ensure};
use etherparse::{IpNumber, PacketBuilder, SlicedPacket, TransportSlice};
use traffic_policy_cluster::model::Dispatch;
use traffic_policy_ebpf::abi::GUE_PORT;

use super::flow::{Flow, Transport};

const TTL: u8 = 64;
/// The MAC address of the sender; its value does not matter.
const SENDER: [u8; 6] = [2, 0, 0, 0, 0, 2];

/// An INIT chunk of SCTP (RFC 9260 section 3.3.2), big-endian: type, flags and length, initiate
/// tag, receiver window, one stream each way, first transmission sequence number.
const INIT: [u8; 20] = [1, 0, 0, 20, 0, 0, 0, 1, 0, 1, 0, 0, 0, 1, 0, 1, 0, 0, 0, 1];

/// Builds a SYN or a later segment, an INIT, a datagram, or an empty packet of another protocol,
/// addressed to the device with this MAC address.
pub fn build(flow: &Flow, to: [u8; 6]) -> Result<Vec<u8>> {
    let builder = PacketBuilder::ethernet2(SENDER, to);
    let builder = match (flow.source.ip(), flow.destination.ip()) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            builder.ipv4(source.octets(), destination.octets(), TTL)
        }
        (IpAddr::V6(source), IpAddr::V6(destination)) => {
            builder.ipv6(source.octets(), destination.octets(), TTL)
        }
        _ => anyhow::bail!("{} and {} are of different IP families", flow.source, flow.destination),
    };
    let (source, destination) = (flow.source.port(), flow.destination.port());
    let mut frame = Vec::new();
    let context = "the packet could not be built";
    match flow.transport {
        Transport::TCP => {
            let segment = builder.tcp(source, destination, 1, 64_240);
            let segment = if flow.later { segment.ack(1) } else { segment.syn() };
            segment.write(&mut frame, &[]).context(context)?;
        }
        Transport::UDP => builder.udp(source, destination).write(&mut frame, &[]).context(context)?,
        Transport::SCTP => {
            let ports = [source.to_be_bytes(), destination.to_be_bytes()].concat();
            // The verification tag and the checksum after the ports are 0: the packet has no
            // receiver.
            let packet = [ports.as_slice(), &[0; 8], &INIT].concat();
            builder.write(&mut frame, IpNumber(flow.transport.0), &packet).context(context)?;
        }
        other => builder.write(&mut frame, IpNumber(other.0), &[0; 12]).context(context)?,
    }
    Ok(frame)
}

/// The length of an Ethernet header.
const ETHERNET: usize = 14;

/// A port of [`is_outer_port`][traffic_policy_ebpf::abi::is_outer_port].
const OUTER_PORT: u16 = 512;

/// Puts the IP packet of a frame within another packet of its family (RFC 2003, RFC 2473), or
/// within UDP.
///
/// # Errors
/// The addresses are of another family than the packet, or it is too long.
pub fn within(frame: &[u8], source: IpAddr, destination: IpAddr, dispatch: Dispatch) -> Result<Vec<u8>> {
    let (ethernet, inner) = frame.split_at(ETHERNET);
    let (builder, protocol, version) = match (source, destination) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            let (source, destination) = (source.octets(), destination.octets());
            (PacketBuilder::ipv4(source, destination, TTL), IpNumber::IPV4, 4)
        }
        (IpAddr::V6(source), IpAddr::V6(destination)) => {
            let (source, destination) = (source.octets(), destination.octets());
            (PacketBuilder::ipv6(source, destination, TTL), IpNumber::IPV6, 6)
        }
        _ => anyhow::bail!("{source} and {destination} are of different IP families"),
    };
    let found = inner.first().map_or(0, |first| first >> 4);
    ensure!(found == version, "a packet of IPv{found} is not forwarded directly from {source}");
    let mut outer = ethernet.to_vec();
    let written = if dispatch.within() == Dispatch::Udp {
        builder.udp(OUTER_PORT, GUE_PORT.to_host()).write(&mut outer, inner)
    } else {
        builder.write(&mut outer, protocol, inner)
    };
    written.context("the outer packet could not be built")?;
    Ok(outer)
}

/// Returns the destination of the IP packet in a frame.
pub fn destination(frame: &[u8]) -> Option<IpAddr> {
    match SlicedPacket::from_ethernet(frame).ok()?.net? {
        etherparse::NetSlice::Ipv4(ip) => Some(ip.header().destination_addr().into()),
        etherparse::NetSlice::Ipv6(ip) => Some(ip.header().destination_addr().into()),
        etherparse::NetSlice::Arp(_) => None,
    }
}

/// The source, destination and time to live of a packet with ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seen {
    pub source: SocketAddr,
    pub destination: SocketAddr,
    pub ttl: u8,
}

/// Returns the addresses, ports and time to live of an Ethernet frame; `None` if it has no ports of
/// TCP, UDP or SCTP.
pub fn read(frame: &[u8]) -> Option<Seen> {
    let packet = SlicedPacket::from_ethernet(frame).ok()?;
    let ports = |payload: &etherparse::IpPayloadSlice<'_>| {
        let known = payload.ip_number.0 == Transport::SCTP.0 && !payload.fragmented;
        payload
            .payload
            .first_chunk::<4>()
            .filter(|_| known)
            .map(|[a, b, c, d]| (u16::from_be_bytes([*a, *b]), u16::from_be_bytes([*c, *d])))
    };
    let of_sctp = packet.net.as_ref().and_then(|net| net.ip_payload_ref()).and_then(ports);
    let (source, destination, ttl): (IpAddr, IpAddr, u8) = match packet.net? {
        etherparse::NetSlice::Ipv4(ip) => {
            let header = ip.header();
            (header.source_addr().into(), header.destination_addr().into(), header.ttl())
        }
        etherparse::NetSlice::Ipv6(ip) => {
            let header = ip.header();
            (header.source_addr().into(), header.destination_addr().into(), header.hop_limit())
        }
        _ => return None,
    };
    let (from, to) = match packet.transport {
        Some(TransportSlice::Tcp(tcp)) => (tcp.source_port(), tcp.destination_port()),
        Some(TransportSlice::Udp(udp)) => (udp.source_port(), udp.destination_port()),
        _ => of_sctp?,
    };
    Some(Seen { source: SocketAddr::new(source, from), destination: SocketAddr::new(destination, to), ttl })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_and_back() {
        for (source, destination) in [
            ("192.0.2.1:7", "10.0.0.1:80/udp"),
            ("[fd00::1]:7", "[fd00::2]:80"),
            ("192.0.2.1:7", "10.0.0.1:80/sctp"),
            ("[fd00::1]:7", "[fd00::2]:80/sctp"),
        ] {
            let flow = Flow::from_arguments(source, destination, None).unwrap();
            let seen = read(&build(&flow, [2; 6]).unwrap()).unwrap();
            assert_eq!(seen, Seen { source: flow.source, destination: flow.destination, ttl: TTL });
        }
        let flow = Flow::from_arguments("192.0.2.1:7", "10.0.0.1:80", None).unwrap();
        let frame = build(&flow, [2; 6]).unwrap();
        let of = |dispatch| within(&frame, [10, 0, 0, 1].into(), [10, 1, 0, 2].into(), dispatch).unwrap();
        let outer = of(Dispatch::Udp);
        assert_eq!((outer.len(), &outer[42..]), (frame.len() + 28, &frame[14..]));
        assert_eq!((outer[23], &outer[34..38]), (17, &[2, 0, 0x17, 0xc0][..]));
        let outer = of(Dispatch::Ipip);
        assert_eq!((outer.len(), &outer[34..]), (frame.len() + 20, &frame[14..]));
        let sliced = SlicedPacket::from_ethernet(&outer).unwrap();
        let Some(etherparse::NetSlice::Ipv4(ip)) = &sliced.net else { panic!("{outer:?}") };
        assert_eq!(ip.header().to_header().calc_header_checksum(), ip.header().header_checksum());
        let [from, to] = ["fd00::1", "fd00::2"].map(|text| text.parse().unwrap());
        assert!(within(&frame, from, to, Dispatch::Ipip).is_err(), "of another family");
        let flow = Flow::from_arguments("[fd00::7]:7", "[fd00::8]:80", None).unwrap();
        let frame = build(&flow, [2; 6]).unwrap();
        let outer = within(&frame, from, to, Dispatch::Ipip).unwrap();
        assert_eq!((outer.len(), outer[20], &outer[54..]), (frame.len() + 40, 41, &frame[14..]));
        let other = Flow::from_arguments("192.0.2.1", "10.0.0.1:80/33", None).unwrap();
        assert_eq!(read(&build(&other, [2; 6]).unwrap()), None);
    }
}
