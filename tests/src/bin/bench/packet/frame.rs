//! Packets, all of one length, as `feed` writes them.

use std::net::{IpAddr, SocketAddr};

use anyhow::{Result, ensure};
use etherparse::{IpHeaders, PacketBuilder, PacketBuilderStep, TcpHeader, UdpHeader};
use traffic_policy_ebpf::bench::FRAME_WORDS;

use super::stand::{MAC, ROUTER_MAC};

pub(crate) type Frame = [u64; FRAME_WORDS];
pub(crate) const LENGTH: usize = FRAME_WORDS * 8;

/// What is above IP.
#[derive(Clone, Copy)]
pub(crate) enum Content {
    Syn,
    SynAck,
    Ack,
    Datagram,
    /// ICMP, IPv4 only.
    Echo,
    /// The middle of a datagram, IPv4 only.
    LaterFragment,
}

/// The endpoint's first sequence number.
const SEQUENCE: u32 = 7_000;

pub(crate) fn frame(source: SocketAddr, destination: SocketAddr, content: Content) -> Result<Frame> {
    let ethernet = PacketBuilder::ethernet2(ROUTER_MAC, MAC);
    let ip: PacketBuilderStep<IpHeaders> = match (source.ip(), destination.ip()) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            ethernet.ipv4(source.octets(), destination.octets(), 64)
        }
        (IpAddr::V6(source), IpAddr::V6(destination)) => {
            ethernet.ipv6(source.octets(), destination.octets(), 64)
        }
        _ => anyhow::bail!("{source} and {destination} are of two families"),
    };
    let (from, to) = (source.port(), destination.port());
    let mut bytes = Vec::with_capacity(LENGTH);
    match content {
        Content::Syn => tcp(ip.tcp(from, to, 1_000, 65_535).syn(), &mut bytes)?,
        Content::SynAck => tcp(ip.tcp(from, to, SEQUENCE, 65_535).syn().ack(1_001), &mut bytes)?,
        Content::Ack => tcp(ip.tcp(from, to, 1_001, 65_535).ack(SEQUENCE + 1), &mut bytes)?,
        Content::Datagram => {
            let step: PacketBuilderStep<UdpHeader> = ip.udp(from, to);
            let payload = vec![0; LENGTH - step.size(0)];
            step.write(&mut bytes, &payload)?;
        }
        Content::Echo => {
            let step = ip.icmpv4_echo_request(1, 2);
            let payload = vec![0; LENGTH - step.size(0)];
            step.write(&mut bytes, &payload)?;
        }
        Content::LaterFragment => {
            tcp(ip.tcp(from, to, 1_001, 65_535).ack(SEQUENCE + 1), &mut bytes)?;
            // More fragments, and an offset. The programs do not look at the checksum of the IP header.
            bytes[20..22].copy_from_slice(&(1u16 << 13 | 185).to_be_bytes());
        }
    }
    ensure!(bytes.len() == LENGTH, "a frame of {} bytes", bytes.len());
    let mut frame = [0; FRAME_WORDS];
    for (word, bytes) in frame.iter_mut().zip(bytes.chunks_exact(8)) {
        *word = u64::from_ne_bytes(bytes.try_into()?);
    }
    Ok(frame)
}

fn tcp(step: PacketBuilderStep<TcpHeader>, bytes: &mut Vec<u8>) -> Result<()> {
    let payload = vec![0; LENGTH - step.size(0)];
    Ok(step.write(bytes, &payload)?)
}
