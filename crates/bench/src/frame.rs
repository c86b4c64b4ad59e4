//! Packets, all of one length, as the feed writes them, and their expected form: both by
//! etherparse.

use std::net::{IpAddr, SocketAddr};

use anyhow::{Result, ensure};
use etherparse::{IpHeaders, IpNumber, PacketBuilder, PacketBuilderStep, TcpHeader, UdpHeader};
use traffic_policy_bench_ebpf::{FRAME_LENGTH, FRAME_WORDS};

use super::fixture::{MAC, ROUTER_MAC};
use traffic_policy_ebpf::checksum;
use traffic_policy_testing::netlink::Mac;

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
    let ethernet = PacketBuilder::ethernet2(from, to);
    let ip: PacketBuilderStep<IpHeaders> = match (source.ip(), destination.ip()) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            ethernet.ipv4(source.octets(), destination.octets(), ttl)
        }
        (IpAddr::V6(source), IpAddr::V6(destination)) => {
            ethernet.ipv6(source.octets(), destination.octets(), ttl)
        }
        _ => anyhow::bail!("{source} and {destination} are of two families"),
    };
    let (from, to) = (source.port(), destination.port());
    let mut bytes = Vec::with_capacity(FRAME_LENGTH);
    match content {
        Content::Syn => tcp(ip.tcp(from, to, 1_000, 65_535).syn(), &mut bytes)?,
        Content::SynAck => tcp(ip.tcp(from, to, SEQUENCE, 65_535).syn().ack(1_001), &mut bytes)?,
        Content::Ack => tcp(ip.tcp(from, to, 1_001, 65_535).ack(SEQUENCE + 1), &mut bytes)?,
        Content::ReplyAck => {
            let headers = if source.is_ipv4() { ETHERNET + 20 + 20 } else { ETHERNET + 40 + 20 };
            // The SYN-ACK has been filled up with data.
            let next = SEQUENCE + 1 + (FRAME_LENGTH - headers) as u32;
            tcp(ip.tcp(from, to, next, 65_535).ack(1_001), &mut bytes)?;
        }
        Content::Datagram => {
            let step: PacketBuilderStep<UdpHeader> = ip.udp(from, to);
            let payload = vec![0; FRAME_LENGTH - step.size(0)];
            step.write(&mut bytes, &payload)?;
        }
        Content::Echo => {
            let step = ip.icmpv4_echo_request(1, 2);
            let payload = vec![0; FRAME_LENGTH - step.size(0)];
            step.write(&mut bytes, &payload)?;
        }
        Content::WithinIp => {
            let mut inner = Vec::new();
            let segment = PacketBuilder::ipv4([192, 0, 2, 1], [192, 0, 2, 2], ttl).tcp(from, to, 1, 1);
            segment.write(&mut inner, &[])?;
            inner.resize(FRAME_LENGTH - ETHERNET - 20, 0);
            ip.write(&mut bytes, IpNumber::IPV4, &inner)?;
        }
        Content::LaterFragment => {
            tcp(ip.tcp(from, to, 1_001, 65_535).ack(SEQUENCE + 1), &mut bytes)?;
            // The word sets "more fragments" and an offset. The programs do not verify the checksum
            // of the IP header.
            bytes[20..22].copy_from_slice(&(1u16 << 13 | 185).to_be_bytes());
        }
    }
    ensure!(bytes.len() == FRAME_LENGTH, "a frame of {} bytes", bytes.len());
    Ok(bytes)
}

fn tcp(step: PacketBuilderStep<TcpHeader>, bytes: &mut Vec<u8>) -> Result<()> {
    let payload = vec![0; FRAME_LENGTH - step.size(0)];
    Ok(step.write(bytes, &payload)?)
}
