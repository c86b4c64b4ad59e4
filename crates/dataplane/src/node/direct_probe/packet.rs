//! The packets of a question to another node, and its answer.

use std::{
    io,
    net::{IpAddr, SocketAddr},
};

use etherparse::{
    IpNumber, Ipv4Header, Ipv6Header, NetSlice, PacketBuilder, SlicedPacket, TransportSlice, UdpHeader,
};
use traffic_policy_cluster::model::{DirectTarget, Dispatch};
use traffic_policy_ebpf::abi::{GUE_PORT, REPLY_THROUGH_FRONT, identification, maglev, outer_port};

use super::{Answered, ProbeWay};

const TTL: u8 = 64;

/// Returns the packet that asks in this way, from its outermost IP header on, of `length` bytes if
/// there is room for its headers.
pub(super) fn question(
    client: SocketAddr,
    target: &DirectTarget,
    (way, number): (ProbeWay, u32),
    length: Option<usize>,
) -> io::Result<Vec<u8>> {
    let segment = |length| segment(client, target.frontend, number, length);
    let (dispatch, back) = match way {
        ProbeWay::ByMac { .. } => return segment(length),
        ProbeWay::Within(dispatch) => (dispatch, 0),
        ProbeWay::AndBack(dispatch) => (dispatch, REPLY_THROUGH_FRONT),
    };
    let udp = dispatch.within() == Dispatch::Udp;
    let ip = if client.is_ipv4() { Ipv4Header::MIN_LEN } else { Ipv6Header::LEN };
    let outer = ip + if udp { UdpHeader::LEN } else { 0 };
    let inner = segment(length.map(|length| length.saturating_sub(outer)))?;
    let mut body = Vec::new();
    let protocol = if udp {
        let port = outer_port(u64::from(client.port()) << 16).to_host();
        let udp = UdpHeader::without_ipv4_checksum(port, GUE_PORT.to_host(), inner.len());
        body.extend(udp.map_err(io::Error::other)?.to_bytes());
        IpNumber::UDP
    } else if client.is_ipv4() {
        IpNumber::IPV4
    } else {
        IpNumber::IPV6
    };
    body.extend(inner);
    // All owners were asked before, so that the other node sends the packet to no third one.
    let mut packet = header(client.ip(), target.endpoint, protocol, body.len(), maglev::FORMER | back)?;
    packet.extend(body);
    Ok(packet)
}

/// Returns a segment with ACK that belongs to no connection. The RST that answers it has the number
/// that it acknowledges (RFC 9293 section 3.5.2).
fn segment(
    client: SocketAddr,
    frontend: SocketAddr,
    acknowledged: u32,
    length: Option<usize>,
) -> io::Result<Vec<u8>> {
    let builder = match (client.ip(), frontend.ip()) {
        (IpAddr::V4(from), IpAddr::V4(to)) => PacketBuilder::ipv4(from.octets(), to.octets(), TTL),
        (IpAddr::V6(from), IpAddr::V6(to)) => PacketBuilder::ipv6(from.octets(), to.octets(), TTL),
        _ => return Err(io::ErrorKind::InvalidInput.into()),
    };
    let tcp = builder.tcp(client.port(), frontend.port(), 1, 1024).ack(acknowledged);
    let payload = vec![0; length.unwrap_or_default().saturating_sub(tcp.size(0))];
    let mut packet = Vec::with_capacity(tcp.size(payload.len()));
    tcp.write(&mut packet, &payload).map_err(io::Error::other)?;
    Ok(packet)
}

/// Returns the outer IP header.
fn header(from: IpAddr, to: IpAddr, protocol: IpNumber, length: usize, number: u32) -> io::Result<Vec<u8>> {
    let length = u16::try_from(length).map_err(io::Error::other)?;
    match (from, to) {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            let header = Ipv4Header::new(length, TTL, protocol, from.octets(), to.octets());
            let mut header = header.map_err(io::Error::other)?;
            header.identification = identification(number);
            header.dont_fragment = true;
            header.header_checksum = header.calc_header_checksum();
            Ok(header.to_bytes().to_vec())
        }
        (IpAddr::V6(source), IpAddr::V6(destination)) => {
            let header = Ipv6Header {
                payload_length: length,
                next_header: protocol,
                hop_limit: TTL,
                source: source.octets(),
                destination: destination.octets(),
                flow_label: etherparse::Ipv6FlowLabel::try_new(number).map_err(io::Error::other)?,
                ..Ipv6Header::default()
            };
            Ok(header.to_bytes().to_vec())
        }
        _ => Err(io::ErrorKind::InvalidInput.into()),
    }
}

/// The RST that answers a question.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Reset {
    /// The source of the RST; `client` is its destination.
    pub(super) frontend: SocketAddr,
    pub(super) client: SocketAddr,
    /// The sequence number of the RST.
    pub(super) number: u32,
}

/// Reads an answer: an RST, as it is or within an outer packet; `None`: it is another packet.
pub(super) fn answer(packet: &[u8]) -> Option<(Reset, Answered)> {
    let sliced = SlicedPacket::from_ip(packet).ok()?;
    let inner = match &sliced.transport {
        Some(TransportSlice::Udp(udp)) if udp.destination_port() == GUE_PORT.to_host() => udp.payload(),
        None => {
            let ip = sliced.ip_payload()?;
            matches!(ip.ip_number, IpNumber::IPV4 | IpNumber::IPV6).then_some(ip.payload)?
        }
        Some(_) => return Some((reset(&sliced)?, Answered::AsItIs)),
    };
    Some((reset(&SlicedPacket::from_ip(inner).ok()?)?, Answered::Within))
}

fn reset(packet: &SlicedPacket<'_>) -> Option<Reset> {
    let Some(TransportSlice::Tcp(tcp)) = &packet.transport else { return None };
    let (from, to) = match packet.net.as_ref()? {
        NetSlice::Ipv4(ip) => {
            (IpAddr::from(ip.header().source_addr()), IpAddr::from(ip.header().destination_addr()))
        }
        NetSlice::Ipv6(ip) => {
            (IpAddr::from(ip.header().source_addr()), IpAddr::from(ip.header().destination_addr()))
        }
        _ => return None,
    };
    tcp.rst().then(|| Reset {
        frontend: SocketAddr::new(from, tcp.source_port()),
        client: SocketAddr::new(to, tcp.destination_port()),
        number: tcp.sequence_number(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const WAYS: [(ProbeWay, usize); 5] = [
        (ProbeWay::Within(Dispatch::Ipip), 0),
        (ProbeWay::Within(Dispatch::Udp), 8),
        (ProbeWay::AndBack(Dispatch::Ipip), 0),
        (ProbeWay::AndBack(Dispatch::Udp), 8),
        (ProbeWay::ByMac { link: 1, mac: [0; 6] }, 0),
    ];

    fn addresses(ipv6: bool) -> (DirectTarget, SocketAddr) {
        let text = if ipv6 {
            ["fd00::2", "[2001:db8::9]:80", "[fd00::1]:40000"]
        } else {
            ["10.0.2.2", "203.0.113.9:80", "192.0.2.1:40000"]
        };
        let frontend = text[1].parse().unwrap();
        let target = DirectTarget { endpoint: text[0].parse().unwrap(), frontend, by_table: None };
        (target, text[2].parse().unwrap())
    }

    #[test]
    fn a_question_has_the_length_that_it_is_to_have() {
        for ipv6 in [false, true] {
            let (target, client) = addresses(ipv6);
            let ip = if ipv6 { 40 } else { 20 };
            for (way, udp) in WAYS {
                let by_mac = matches!(way, ProbeWay::ByMac { .. });
                let least = ip + 20 + if by_mac { 0 } else { ip + udp };
                let of = |length| question(client, &target, (way, 7), length).unwrap();
                assert_eq!([None, Some(9)].map(|length| of(length).len()), [least; 2], "{way:?}");
                assert_eq!(of(Some(1400)).len(), 1400, "{way:?}");
            }
        }
    }

    #[test]
    fn the_answer_is_the_reset_alone() {
        for ipv6 in [false, true] {
            let (target, client) = addresses(ipv6);
            let frontend = target.frontend;
            let from = |frontend: SocketAddr, client: SocketAddr, reset: bool| {
                let mut packet = segment(frontend, client, 7, None).unwrap();
                let flags = packet.len() - 7;
                packet[flags] = if reset { 0x04 } else { 0x10 };
                packet
            };
            let reset = from(frontend, client, true);
            let expected = Reset { frontend, client, number: 1 };
            assert_eq!(answer(&reset), Some((expected, Answered::AsItIs)));
            assert_eq!(answer(&from(frontend, client, false)), None);
            for protocol in [if ipv6 { IpNumber::IPV6 } else { IpNumber::IPV4 }, IpNumber::UDP] {
                let mut body = Vec::new();
                if protocol == IpNumber::UDP {
                    let udp = UdpHeader::without_ipv4_checksum(600, GUE_PORT.to_host(), reset.len()).unwrap();
                    body.extend(udp.to_bytes());
                }
                body.extend(&reset);
                let mut packet = header(target.endpoint, client.ip(), protocol, body.len(), 0).unwrap();
                packet.extend(body);
                assert_eq!(answer(&packet), Some((expected, Answered::Within)), "{protocol:?}");
                let flags = packet.len() - 7;
                packet[flags] = 0x10;
                assert_eq!(answer(&packet), None, "{protocol:?}: without RST");
            }
        }
    }
}
