//! Packets as values: built layer by layer, changed like any value, and turned into bytes whose
//! lengths and checksums etherparse computes, independently of the packet path.

mod render;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use etherparse::{
    EtherType, Ethernet2Header, Icmpv4Header, Icmpv4Type, Icmpv6Header, Icmpv6Type, IpDscp, IpEcn,
    IpFragOffset, IpNumber, Ipv4Header, Ipv4Options, Ipv6Header, SingleVlanHeader, TcpHeader, UdpHeader,
    VlanId,
};

pub use self::render::{difference, render};
use crate::checksum::crc32c;
use crate::netlink::Mac;

/// Bits of the flags byte of a TCP header.
pub mod flag {
    pub const FIN: u8 = 1;
    pub const SYN: u8 = 2;
    pub const RST: u8 = 4;
    pub const PSH: u8 = 8;
    pub const ACK: u8 = 16;
}

/// Types of SCTP chunks (RFC 9260 section 3.2).
pub mod chunk {
    pub const DATA: u8 = 0;
    pub const INIT: u8 = 1;
    pub const INIT_ACK: u8 = 2;
    pub const SACK: u8 = 3;
    pub const HEARTBEAT: u8 = 4;
    pub const HEARTBEAT_ACK: u8 = 5;
    pub const ABORT: u8 = 6;
    pub const SHUTDOWN: u8 = 7;
    pub const SHUTDOWN_ACK: u8 = 8;
    pub const COOKIE_ECHO: u8 = 10;
    pub const COOKIE_ACK: u8 = 11;
    pub const SHUTDOWN_COMPLETE: u8 = 14;
}

/// An Ethernet frame with an IP packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Packet {
    pub to: Mac,
    pub from: Mac,
    pub vlan: Option<u16>,
    pub source: IpAddr,
    pub destination: IpAddr,
    pub ttl: u8,
    /// DSCP and ECN.
    pub traffic_class: u8,
    /// The identification of IPv4, or the flow label of IPv6.
    pub label: u16,
    /// IPv4 only, as are the three fields after it. The length is a multiple of four bytes.
    pub options: Vec<u8>,
    pub dont_fragment: bool,
    pub more_fragments: bool,
    /// The fragment offset in units of eight bytes.
    pub fragment_offset: u16,
    /// IPv6 only: extension headers in their order.
    pub extensions: Vec<Extension>,
    pub transport: Transport,
    pub payload: Vec<u8>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Transport {
    Tcp(Tcp),
    Udp {
        source: u16,
        destination: u16,
        /// Whether the checksum is computed; otherwise the field is 0, which over IPv4 means that
        /// there is none.
        checksum: bool,
    },
    /// The common header of SCTP; chunks are the payload.
    Sctp {
        source: u16,
        destination: u16,
        tag: u32,
        /// Whether the checksum is computed; otherwise the field is 0, as a socket of this machine
        /// leaves it for the device.
        checksum: bool,
    },
    /// ICMP or ICMPv6, by the family of the addresses.
    Icmp {
        kind: u8,
        code: u8,
        rest: [u8; 4],
    },
    /// Any other protocol: the payload follows the IP header.
    Other(u8),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tcp {
    pub source: u16,
    pub destination: u16,
    pub sequence: u32,
    pub acknowledgement: u32,
    pub flags: u8,
    pub window: u16,
    /// TCP options. The length is a multiple of four bytes.
    pub options: Vec<u8>,
}

/// An IPv6 extension header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Extension {
    pub number: u8,
    /// The bytes after the number of the next header; together with it, a multiple of eight bytes.
    pub rest: Vec<u8>,
}

impl Extension {
    /// A hop-by-hop (0), routing (43) or destination (60) options header of `words` times eight
    /// bytes without content.
    pub fn padding(number: u8, words: u8) -> Self {
        let mut rest = vec![0; usize::from(words) * 8 - 1];
        rest[0] = words - 1;
        if number != 43 {
            // PadN (RFC 8200 section 4.2).
            (rest[1], rest[2]) = (1, words * 8 - 4);
        }
        Self { number, rest }
    }

    /// A fragment header. `offset` is in bytes, a multiple of eight.
    pub fn fragment(offset: u16, more: bool, identification: u32) -> Self {
        let word = (offset | u16::from(more)).to_be_bytes();
        Self { number: 44, rest: [&[0], &word[..], &identification.to_be_bytes()].concat() }
    }
}

impl Packet {
    pub fn new(source: IpAddr, destination: IpAddr, transport: Transport) -> Self {
        Self {
            to: [2; 6],
            from: [4; 6],
            vlan: None,
            source,
            destination,
            ttl: 64,
            traffic_class: 0,
            label: 0,
            options: Vec::new(),
            dont_fragment: true,
            more_fragments: false,
            fragment_offset: 0,
            extensions: Vec::new(),
            transport,
            payload: Vec::new(),
        }
    }

    /// Makes a TCP segment without data.
    pub fn tcp(source: (IpAddr, u16), destination: (IpAddr, u16), flags: u8) -> Self {
        let tcp = Tcp {
            source: source.1,
            destination: destination.1,
            sequence: 1000,
            acknowledgement: if flags & flag::ACK == 0 { 0 } else { 2000 },
            flags,
            window: 512,
            options: Vec::new(),
        };
        Self::new(source.0, destination.0, Transport::Tcp(tcp))
    }

    /// Makes a UDP datagram with a checksum.
    pub fn udp(source: (IpAddr, u16), destination: (IpAddr, u16)) -> Self {
        let udp = Transport::Udp { source: source.1, destination: destination.1, checksum: true };
        Self::new(source.0, destination.0, udp).payload(b"payload")
    }

    /// Makes an SCTP packet with a checksum.
    pub fn sctp(source: (IpAddr, u16), destination: (IpAddr, u16), tag: u32, chunk: &[u8]) -> Self {
        let sctp = Transport::Sctp { source: source.1, destination: destination.1, tag, checksum: true };
        Self::new(source.0, destination.0, sctp).payload(chunk)
    }

    #[must_use]
    pub fn macs(mut self, from: Mac, to: Mac) -> Self {
        (self.from, self.to) = (from, to);
        self
    }

    #[must_use]
    pub fn payload(mut self, payload: &[u8]) -> Self {
        self.payload = payload.to_vec();
        self
    }

    #[must_use]
    pub fn ttl(mut self, ttl: u8) -> Self {
        self.ttl = ttl;
        self
    }

    #[must_use]
    pub fn source(mut self, (address, port): (IpAddr, u16)) -> Self {
        self.source = address;
        *self.ports().0 = port;
        self
    }

    #[must_use]
    pub fn destination(mut self, (address, port): (IpAddr, u16)) -> Self {
        self.destination = address;
        *self.ports().1 = port;
        self
    }

    /// Sets the sequence and acknowledgement number of a TCP segment.
    #[must_use]
    pub fn numbers(mut self, sequence: u32, acknowledgement: u32) -> Self {
        let tcp = self.tcp_mut();
        (tcp.sequence, tcp.acknowledgement) = (sequence, acknowledgement);
        self
    }

    /// Applies any other change.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }

    pub fn tcp_mut(&mut self) -> &mut Tcp {
        match &mut self.transport {
            Transport::Tcp(tcp) => tcp,
            other => panic!("not TCP: {other:?}"),
        }
    }

    fn ports(&mut self) -> (&mut u16, &mut u16) {
        match &mut self.transport {
            Transport::Tcp(tcp) => (&mut tcp.source, &mut tcp.destination),
            Transport::Udp { source, destination, .. } | Transport::Sctp { source, destination, .. } => {
                (source, destination)
            }
            other => panic!("no ports: {other:?}"),
        }
    }

    /// Splits the packet into fragments with `size` bytes after the IP header, a multiple of eight;
    /// the last may be shorter. Extension headers are repeated in each, before the fragment header.
    pub fn fragments(&self, size: usize) -> Vec<Self> {
        let (number, segment) = self.segment();
        let mut fragments = Vec::new();
        for (index, payload) in segment.chunks(size).enumerate() {
            let offset = u16::try_from(index * size).expect("within a packet");
            let more = index * size + payload.len() < segment.len();
            let mut fragment =
                Self { transport: Transport::Other(number.0), ..self.clone() }.payload(payload);
            if self.source.is_ipv4() {
                fragment.dont_fragment = false;
                fragment.more_fragments = more;
                fragment.fragment_offset = offset / 8;
            } else {
                fragment.extensions.push(Extension::fragment(offset, more, self.label.into()));
            }
            fragments.push(fragment);
        }
        fragments
    }

    /// The bytes of the frame.
    pub fn bytes(&self) -> Vec<u8> {
        let (number, segment) = self.segment();
        let (ether_type, ip) = match (self.source, self.destination) {
            (IpAddr::V4(source), IpAddr::V4(destination)) => {
                (EtherType::IPV4, self.ipv4(source, destination, number, segment.len()))
            }
            (IpAddr::V6(source), IpAddr::V6(destination)) => {
                (EtherType::IPV6, self.ipv6(source, destination, number, segment.len()))
            }
            (source, destination) => panic!("{source} and {destination} are of two families"),
        };
        let outer = if self.vlan.is_some() { EtherType::VLAN_TAGGED_FRAME } else { ether_type };
        let ethernet = Ethernet2Header { source: self.from, destination: self.to, ether_type: outer };
        let mut bytes = ethernet.to_bytes().to_vec();
        if let Some(vlan) = self.vlan {
            let vlan_id = VlanId::try_new(vlan).expect("a VLAN number has twelve bits");
            let tag = SingleVlanHeader { vlan_id, ether_type, ..SingleVlanHeader::default() };
            bytes.extend(tag.to_bytes());
        }
        bytes.extend(ip);
        bytes.extend(segment);
        bytes
    }

    fn ipv4(&self, source: Ipv4Addr, destination: Ipv4Addr, number: IpNumber, length: usize) -> Vec<u8> {
        let length = u16::try_from(length).expect("an IPv4 packet has at most 65,535 bytes");
        let mut header = Ipv4Header::new(length, self.ttl, number, source.octets(), destination.octets())
            .expect("an IPv4 packet has at most 65,535 bytes");
        header.options = Ipv4Options::try_from(self.options.as_slice()).expect("whole words of options");
        header.set_payload_len(usize::from(length)).expect("an IPv4 packet has at most 65,535 bytes");
        header.dscp = IpDscp::try_new(self.traffic_class >> 2).expect("six bits");
        header.ecn = IpEcn::try_new(self.traffic_class & 3).expect("two bits");
        header.identification = self.label;
        header.dont_fragment = self.dont_fragment;
        header.more_fragments = self.more_fragments;
        header.fragment_offset =
            IpFragOffset::try_new(self.fragment_offset).expect("a fragment offset has 13 bits");
        header.header_checksum = header.calc_header_checksum();
        header.to_bytes().to_vec()
    }

    fn ipv6(&self, source: Ipv6Addr, destination: Ipv6Addr, number: IpNumber, length: usize) -> Vec<u8> {
        let mut extensions = Vec::new();
        for (at, extension) in self.extensions.iter().enumerate() {
            extensions.push(self.extensions.get(at + 1).map_or(number.0, |next| next.number));
            extensions.extend(&extension.rest);
        }
        let length = length + extensions.len();
        let header = Ipv6Header {
            traffic_class: self.traffic_class,
            flow_label: u32::from(self.label).try_into().expect("a flow label has twenty bits"),
            payload_length: length.try_into().expect("an IPv6 packet holds at most 65,535 bytes"),
            next_header: self.extensions.first().map_or(number, |first| IpNumber(first.number)),
            hop_limit: self.ttl,
            source: source.octets(),
            destination: destination.octets(),
        };
        let mut bytes = header.to_bytes().to_vec();
        bytes.extend(extensions);
        bytes
    }

    /// The protocol number, and the bytes of the transport header with its payload.
    fn segment(&self) -> (IpNumber, Vec<u8>) {
        let (number, mut bytes) = match &self.transport {
            Transport::Tcp(tcp) => (IpNumber::TCP, self.tcp_bytes(tcp)),
            Transport::Udp { source, destination, checksum } => {
                (IpNumber::UDP, self.udp_bytes(*source, *destination, *checksum))
            }
            Transport::Sctp { source, destination, tag, checksum } => {
                (IpNumber::SCTP, self.sctp_bytes(*source, *destination, *tag, *checksum))
            }
            Transport::Icmp { kind, code, rest } => self.icmp_bytes(*kind, *code, *rest),
            Transport::Other(number) => (IpNumber(*number), Vec::new()),
        };
        bytes.extend(&self.payload);
        (number, bytes)
    }

    fn tcp_bytes(&self, tcp: &Tcp) -> Vec<u8> {
        let mut header = TcpHeader::new(tcp.source, tcp.destination, tcp.sequence, tcp.window);
        header.acknowledgment_number = tcp.acknowledgement;
        header.fin = tcp.flags & flag::FIN != 0;
        header.syn = tcp.flags & flag::SYN != 0;
        header.rst = tcp.flags & flag::RST != 0;
        header.psh = tcp.flags & flag::PSH != 0;
        header.ack = tcp.flags & flag::ACK != 0;
        header.set_options_raw(&tcp.options).expect("at most forty bytes of options");
        header.checksum = match (self.source, self.destination) {
            (IpAddr::V4(s), IpAddr::V4(d)) => {
                header.calc_checksum_ipv4_raw(s.octets(), d.octets(), &self.payload)
            }
            (IpAddr::V6(s), IpAddr::V6(d)) => {
                header.calc_checksum_ipv6_raw(s.octets(), d.octets(), &self.payload)
            }
            _ => panic!("addresses of two families"),
        }
        .expect("a segment fits its packet");
        header.to_bytes().to_vec()
    }

    fn udp_bytes(&self, source_port: u16, destination_port: u16, checksum: bool) -> Vec<u8> {
        let length = 8 + self.payload.len();
        let length = u16::try_from(length).expect("a datagram has at most 65,535 bytes");
        let mut header = UdpHeader { source_port, destination_port, length, checksum: 0 };
        if checksum {
            header.checksum = match (self.source, self.destination) {
                (IpAddr::V4(s), IpAddr::V4(d)) => {
                    header.calc_checksum_ipv4_raw(s.octets(), d.octets(), &self.payload)
                }
                (IpAddr::V6(s), IpAddr::V6(d)) => {
                    header.calc_checksum_ipv6_raw(s.octets(), d.octets(), &self.payload)
                }
                _ => panic!("addresses of two families"),
            }
            .expect("a datagram fits its packet");
        }
        header.to_bytes().to_vec()
    }

    fn sctp_bytes(&self, source: u16, destination: u16, tag: u32, checksum: bool) -> Vec<u8> {
        let ports = [source.to_be_bytes(), destination.to_be_bytes()].concat();
        let mut header = [ports, tag.to_be_bytes().to_vec(), vec![0; 4]].concat();
        if checksum {
            let sum = crc32c(&[header.as_slice(), &self.payload].concat());
            header[8..].copy_from_slice(&sum.to_le_bytes());
        }
        header
    }

    fn icmp_bytes(&self, type_u8: u8, code_u8: u8, bytes5to8: [u8; 4]) -> (IpNumber, Vec<u8>) {
        match (self.source, self.destination) {
            (IpAddr::V4(_), IpAddr::V4(_)) => {
                let kind = Icmpv4Type::Unknown { type_u8, code_u8, bytes5to8 };
                let header = Icmpv4Header::with_checksum(kind, &self.payload);
                (IpNumber::ICMP, header.to_bytes().to_vec())
            }
            (IpAddr::V6(s), IpAddr::V6(d)) => {
                let kind = Icmpv6Type::Unknown { type_u8, code_u8, bytes5to8 };
                let header = Icmpv6Header::with_checksum(kind, s.octets(), d.octets(), &self.payload)
                    .expect("an error fits its packet");
                (IpNumber::IPV6_ICMP, header.to_bytes().to_vec())
            }
            _ => panic!("addresses of two families"),
        }
    }
}
