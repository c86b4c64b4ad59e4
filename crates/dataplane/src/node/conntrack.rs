//! Connections that conntrack translates according to an earlier proxy's rules, read through
//! ctnetlink.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
};

use netlink_sys::protocols::NETLINK_NETFILTER;
use traffic_policy_cluster::model::Protocol;

use super::netlink::{Connection as Netlink, find};

/// A connection whose destination conntrack translates.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Connection {
    pub protocol: Protocol,
    pub client: SocketAddr,
    /// The destination of the client's packets: the frontend.
    pub frontend: SocketAddr,
    pub endpoint: SocketAddr,
    /// The source that the endpoint sees: another one than the client behind a masquerade.
    pub source: SocketAddr,
    /// Whether it is closed or about to expire: a client that uses its ports again starts a new
    /// connection.
    pub over: bool,
}

// linux/netfilter/nfnetlink.h, linux/netfilter/nfnetlink_conntrack.h
const CONNTRACK_GET: u16 = 1 << 8 | 1;
const TUPLE_ORIGINAL: u16 = 1;
const TUPLE_REPLY: u16 = 2;
const STATUS: u16 = 3;
const PROTOCOL_INFO: u16 = 4;
const TIMEOUT: u16 = 7;
const ZONE: u16 = 18;
const TUPLE_IP: u16 = 1;
const TUPLE_PROTOCOL: u16 = 2;
const INFO_TCP: u16 = 1;
const TCP_STATE: u16 = 1;
/// IPS_DST_NAT
const DESTINATION_NAT: u32 = 1 << 5;
/// TCP_CONNTRACK_TIME_WAIT, TCP_CONNTRACK_CLOSE
const TCP_OVER: [u8; 2] = [7, 8];
/// `struct nfgenmsg`.
const HEADER: usize = 4;
/// The remaining time, in seconds, below which the entry of a UDP flow or an SCTP association
/// counts as over; by default that includes every association that is being set up, shut down or
/// closed (`sctp_timeouts` in net/netfilter/nf_conntrack_proto_sctp.c). The list is read every few
/// seconds: a packet after the end must not be treated as one that conntrack still translates.
const NEAR_END: u32 = 15;

/// Returns all connections whose destination is translated, of both families.
///
/// It blocks: a node may have hundreds of thousands.
///
/// # Errors
/// The kernel has no ctnetlink, or CAP_NET_ADMIN is missing.
pub fn translated() -> io::Result<Vec<Connection>> {
    let mut netfilter = Netlink::open(NETLINK_NETFILTER)?;
    let mut connections = Vec::new();
    // Family 0 stands for both.
    netfilter.dump_each(CONNTRACK_GET, &[0; HEADER], |message| connections.extend(connection(message)))?;
    Ok(connections)
}

fn connection(message: &[u8]) -> Option<Connection> {
    let attributes = message.get(HEADER..)?;
    let status = find(attributes, STATUS).and_then(number)?;
    if status & DESTINATION_NAT == 0 || find(attributes, ZONE).is_some() {
        return None;
    }
    let (protocol, client, frontend) = tuple(find(attributes, TUPLE_ORIGINAL)?)?;
    let (_, endpoint, source) = tuple(find(attributes, TUPLE_REPLY)?)?;
    let over = match protocol {
        Protocol::Tcp => {
            let info = find(attributes, PROTOCOL_INFO).and_then(|info| find(info, INFO_TCP));
            let state = info.and_then(|tcp| find(tcp, TCP_STATE)).and_then(|state| state.first());
            state.is_some_and(|state| TCP_OVER.contains(state))
        }
        Protocol::Udp | Protocol::Sctp => {
            find(attributes, TIMEOUT).and_then(number).is_some_and(|left| left < NEAR_END)
        }
    };
    Some(Connection { protocol, client, frontend, endpoint, source, over })
}

/// Returns protocol, source and destination.
fn tuple(attributes: &[u8]) -> Option<(Protocol, SocketAddr, SocketAddr)> {
    let (ip, transport) = (find(attributes, TUPLE_IP)?, find(attributes, TUPLE_PROTOCOL)?);
    let protocol = match find(transport, 1)?.first()? {
        6 => Protocol::Tcp,
        17 => Protocol::Udp,
        132 => Protocol::Sctp,
        _ => return None,
    };
    let port = |kind| find(transport, kind)?.first_chunk().map(|bytes| u16::from_be_bytes(*bytes));
    let address = |v4, v6| {
        let short = find(ip, v4).and_then(|bytes| bytes.first_chunk::<4>());
        let long = || find(ip, v6).and_then(|bytes| bytes.first_chunk::<16>());
        short
            .map(|octets| IpAddr::from(Ipv4Addr::from(*octets)))
            .or_else(|| long().map(|octets| IpAddr::from(Ipv6Addr::from(*octets))))
    };
    Some((protocol, SocketAddr::new(address(1, 3)?, port(2)?), SocketAddr::new(address(2, 4)?, port(3)?)))
}

fn number(value: &[u8]) -> Option<u32> {
    value.first_chunk().map(|bytes| u32::from_be_bytes(*bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::netlink::attribute;

    const NESTED: u16 = 0x8000;

    fn side(source: &str, destination: &str, protocol: u8) -> Vec<u8> {
        let [source, destination]: [SocketAddr; 2] = [source, destination].map(|text| text.parse().unwrap());
        let address = |address: IpAddr, v4, v6| match address {
            IpAddr::V4(address) => attribute(v4, &address.octets()),
            IpAddr::V6(address) => attribute(v6, &address.octets()),
        };
        let ip = [address(source.ip(), 1, 3), address(destination.ip(), 2, 4)].concat();
        let transport = [
            attribute(1, &[protocol]),
            attribute(2, &source.port().to_be_bytes()),
            attribute(3, &destination.port().to_be_bytes()),
        ];
        [attribute(1 | NESTED, &ip), attribute(2 | NESTED, &transport.concat())].concat()
    }

    fn message(protocol: u8, sides: [(&str, &str); 2], status: u32, more: &[Vec<u8>]) -> Vec<u8> {
        let [original, reply] = sides.map(|(source, destination)| side(source, destination, protocol));
        let mut message = vec![2, 0, 0, 0];
        message.extend(attribute(TUPLE_ORIGINAL | NESTED, &original));
        message.extend(attribute(TUPLE_REPLY | NESTED, &reply));
        message.extend(attribute(STATUS, &status.to_be_bytes()));
        message.extend(more.concat());
        message
    }

    const SIDES: [(&str, &str); 2] =
        [("192.0.2.10:40000", "172.18.0.11:30080"), ("10.244.2.2:8080", "172.18.0.11:5555")];

    fn tcp_state(state: u8) -> Vec<u8> {
        attribute(PROTOCOL_INFO | NESTED, &attribute(INFO_TCP | NESTED, &attribute(TCP_STATE, &[state])))
    }

    #[test]
    fn both_sides_of_a_translated_connection() {
        let found = connection(&message(6, SIDES, 0x1ae, &[tcp_state(3)])).unwrap();
        let expected = Connection {
            protocol: Protocol::Tcp,
            client: "192.0.2.10:40000".parse().unwrap(),
            frontend: "172.18.0.11:30080".parse().unwrap(),
            endpoint: "10.244.2.2:8080".parse().unwrap(),
            source: "172.18.0.11:5555".parse().unwrap(),
            over: false,
        };
        assert_eq!(found, expected);
        let sides = [("[fd00::1]:9", "[fd00::2]:53"), ("[fd00::3]:5353", "[fd00::1]:9")];
        let found = connection(&message(17, sides, DESTINATION_NAT, &[])).unwrap();
        assert_eq!((found.protocol, found.endpoint.to_string()), (Protocol::Udp, "[fd00::3]:5353".into()));
    }

    #[test]
    fn what_is_closed_or_about_to_expire_is_over() {
        for (state, over) in [(1, false), (3, false), (6, false), (7, true), (8, true)] {
            let found = connection(&message(6, SIDES, DESTINATION_NAT, &[tcp_state(state)])).unwrap();
            assert_eq!(found.over, over, "{state}");
        }
        for protocol in [17, 132] {
            for (left, over) in [(120_u32, false), (15, false), (14, true)] {
                let timeout = attribute(TIMEOUT, &left.to_be_bytes());
                let found = connection(&message(protocol, SIDES, DESTINATION_NAT, &[timeout])).unwrap();
                assert_eq!(found.over, over, "{protocol}: {left}");
            }
        }
    }

    #[test]
    fn others_are_left_out_and_nothing_is_read_past_the_end() {
        assert_eq!(connection(&message(6, SIDES, 0x18e, &[])), None, "its destination is not translated");
        assert_eq!(connection(&message(33, SIDES, DESTINATION_NAT, &[])), None, "DCCP");
        let zone = attribute(ZONE, &[0, 7]);
        assert_eq!(connection(&message(6, SIDES, DESTINATION_NAT, &[zone])), None, "of a zone");
        let whole = message(6, SIDES, DESTINATION_NAT, &[]);
        for end in 0..whole.len() {
            connection(&whole[..end]);
        }
    }
}
