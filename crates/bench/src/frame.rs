//! Packets, all of one length, as the feed writes them, and their expected form: both by
//! etherparse.

use std::net::SocketAddr;

use anyhow::{Result, ensure};
use etherparse::IpNumber;
use traffic_policy_bench_ebpf::{FRAME_LENGTH, FRAME_WORDS};

use super::fixture::{MAC, ROUTER_MAC};
use traffic_policy_ebpf::checksum;
use traffic_policy_testing::{
    netlink::Mac,
    packet::{Packet, Transport, flag},
};

/// A frame as words made of its bytes.
pub type Frame = [u64; FRAME_WORDS];

/// Content above IP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    Syn,
    SynAck,
    /// A segment of the client.
    Ack,
    /// A segment of the endpoint.
    ReplyAck,
    Datagram,
    /// An ICMP echo request, IPv4 only.
    Echo,
    /// A middle fragment of a datagram, IPv4 only.
    LaterFragment,
    /// A packet within IP (RFC 2003), as network plugins send them.
    WithinIp,
}

/// The endpoint's first sequence number.
const SEQUENCE: u32 = 7_000;
const TTL: u8 = 64;
/// Bytes of an Ethernet header.
const ETHERNET: usize = 14;
/// Offsets in a frame: total length and checksum of the IPv4 header (RFC 791 section 3.1).
const LENGTH: usize = ETHERNET + 2;
const HEADER_SUM: usize = ETHERNET + 10;

/// Builds a packet that arrives at the node from its router.
pub fn frame(source: SocketAddr, destination: SocketAddr, content: Content) -> Result<Frame> {
    let bytes = bytes([ROUTER_MAC, MAC], TTL, source, destination, content)?;
    Ok(packed(&bytes))
}

/// Builds the same packet as the node forwards it to its router: one hop further, with these
/// addresses.
pub fn forwarded(source: SocketAddr, destination: SocketAddr, content: Content) -> Result<Vec<u8>> {
    bytes([MAC, ROUTER_MAC], TTL - 1, source, destination, content)
}

/// Returns the same frame, addressed to another node than the fixture's.
#[must_use]
pub fn addressed(mut frame: Frame, to: Mac) -> Frame {
    let [first, ..] = &mut frame;
    let mut bytes = first.to_ne_bytes();
    bytes[..6].copy_from_slice(&to);
    *first = u64::from_ne_bytes(bytes);
    frame
}

/// Returns the same IPv4 frame as the beginning of an IP packet of `length` bytes.
#[must_use]
pub fn lengthened(frame: &[u8], length: u16) -> Vec<u8> {
    let mut bytes = frame.to_vec();
    let word = |bytes: &[u8], at: usize| u16::from_ne_bytes([bytes[at], bytes[at + 1]]);
    let (former, sum) = (word(&bytes, LENGTH), word(&bytes, HEADER_SUM));
    bytes[LENGTH..LENGTH + 2].copy_from_slice(&length.to_be_bytes());
    let delta = checksum::delta(former.into(), word(&bytes, LENGTH).into());
    bytes[HEADER_SUM..HEADER_SUM + 2].copy_from_slice(&checksum::update(sum, delta).to_ne_bytes());
    bytes
}

/// Returns the frame that consists of these bytes: the inverse of [`unpacked`].
///
/// # Panics
/// If there are not [`FRAME_LENGTH`] bytes.
pub fn packed(bytes: &[u8]) -> Frame {
    let mut words =
        bytes.chunks_exact(8).map(|word| u64::from_ne_bytes(word.try_into().expect("eight bytes")));
    std::array::from_fn(|_| words.next().expect("a whole frame"))
}

/// Returns the bytes of a frame.
pub fn unpacked(frame: &Frame) -> Vec<u8> {
    frame.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

fn bytes(
    [from, to]: [Mac; 2],
    ttl: u8,
    source: SocketAddr,
    destination: SocketAddr,
    content: Content,
) -> Result<Vec<u8>> {
    ensure!(source.is_ipv4() == destination.is_ipv4(), "{source} and {destination} are of two families");
    let ends = [source, destination].map(|end| (end.ip(), end.port()));
    let tcp = |flags, sequence, acknowledgement| {
        let segment = Packet::tcp(ends[0], ends[1], flags).numbers(sequence, acknowledgement);
        segment.with(|packet| packet.tcp_mut().window = 65_535)
    };
    let other = |transport| Packet::new(source.ip(), destination.ip(), transport);
    let packet = match content {
        Content::Syn => tcp(flag::SYN, 1_000, 0),
        Content::SynAck => tcp(flag::SYN | flag::ACK, SEQUENCE, 1_001),
        Content::Ack => tcp(flag::ACK, 1_001, SEQUENCE + 1),
        Content::ReplyAck => {
            let headers = if source.is_ipv4() { ETHERNET + 20 + 20 } else { ETHERNET + 40 + 20 };
            // The SYN-ACK has been filled up with data.
            tcp(flag::ACK, SEQUENCE + 1 + (FRAME_LENGTH - headers) as u32, 1_001)
        }
        Content::Datagram => Packet::udp(ends[0], ends[1]).payload(&[]),
        Content::Echo => other(Transport::Icmp { kind: 8, code: 0, rest: [0, 1, 0, 2] }),
        Content::WithinIp => {
            let (from, to) = (([192, 0, 2, 1].into(), ends[0].1), ([192, 0, 2, 2].into(), ends[1].1));
            let segment = Packet::tcp(from, to, 0).numbers(1, 0).ttl(ttl);
            let inner = segment.with(|packet| packet.tcp_mut().window = 1).bytes();
            other(Transport::Other(IpNumber::IPV4.0)).payload(&inner[ETHERNET..])
        }
        Content::LaterFragment => tcp(flag::ACK, 1_001, SEQUENCE + 1).with(|packet| {
            (packet.dont_fragment, packet.more_fragments, packet.fragment_offset) = (false, true, 185);
        }),
    };
    let mut packet = packet.macs(from, to).ttl(ttl);
    let missing = FRAME_LENGTH.saturating_sub(packet.bytes().len());
    packet.payload.resize(packet.payload.len() + missing, 0);
    let bytes = packet.bytes();
    ensure!(bytes.len() == FRAME_LENGTH, "a frame of {} bytes", bytes.len());
    Ok(bytes)
}
