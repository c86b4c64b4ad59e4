//! Frames as text, one line for each layer, for messages of failed tests.

use std::fmt::Write as _;

use etherparse::{LaxNetSlice, LaxSlicedPacket, TransportSlice};

use crate::checksum::verify;
use crate::netlink::Mac;

/// Renders a frame as far as it can be parsed, and the rest in hexadecimal.
pub fn render(frame: &[u8]) -> String {
    let mut text = String::new();
    let Ok(packet) = LaxSlicedPacket::from_ethernet(frame) else {
        return format!("bytes {}\n", hex(frame));
    };
    if let [t0, t1, t2, t3, t4, t5, f0, f1, f2, f3, f4, f5, a, b, ..] = *frame {
        let (to, from) = (mac([t0, t1, t2, t3, t4, t5]), mac([f0, f1, f2, f3, f4, f5]));
        writeln!(text, "ethernet {from} > {to} type {a:02x}{b:02x}").ok();
    }
    match &packet.net {
        Some(LaxNetSlice::Ipv4(ip)) => {
            let header = ip.header();
            let flags = match (header.dont_fragment(), header.more_fragments()) {
                (true, true) => "df mf",
                (true, false) => "df",
                (false, true) => "mf",
                (false, false) => "-",
            };
            writeln!(
                text,
                "ipv4 {} > {} protocol {} ttl {} length {} class {} id {} {flags} offset {} words {} sum {:04x}",
                header.source_addr(),
                header.destination_addr(),
                header.protocol().0,
                header.ttl(),
                header.total_len(),
                header.dcp().value() << 2 | header.ecn().value(),
                header.identification(),
                header.fragments_offset().value(),
                header.ihl(),
                header.header_checksum(),
            )
            .ok();
        }
        Some(LaxNetSlice::Ipv6(ip)) => {
            let header = ip.header();
            writeln!(
                text,
                "ipv6 {} > {} next {} hops {} length {} class {} label {}",
                header.source_addr(),
                header.destination_addr(),
                header.next_header().0,
                header.hop_limit(),
                header.payload_length(),
                header.traffic_class(),
                header.flow_label().value(),
            )
            .ok();
        }
        _ => writeln!(text, "no IP").unwrap_or_default(),
    }
    let payload = match &packet.transport {
        Some(TransportSlice::Tcp(tcp)) => {
            let named =
                [(tcp.syn(), 'S'), (tcp.fin(), 'F'), (tcp.rst(), 'R'), (tcp.psh(), 'P'), (tcp.ack(), 'A')];
            let flags: String = named.iter().filter(|(set, _)| *set).map(|(_, name)| name).collect();
            writeln!(
                text,
                "tcp {} > {} [{flags}] seq {} ack {} window {} words {} sum {:04x}",
                tcp.source_port(),
                tcp.destination_port(),
                tcp.sequence_number(),
                tcp.acknowledgment_number(),
                tcp.window_size(),
                tcp.data_offset(),
                tcp.checksum(),
            )
            .ok();
            tcp.payload()
        }
        Some(TransportSlice::Udp(udp)) => {
            let (from, to) = (udp.source_port(), udp.destination_port());
            writeln!(text, "udp {from} > {to} length {} sum {:04x}", udp.length(), udp.checksum()).ok();
            udp.payload()
        }
        Some(TransportSlice::Icmpv4(icmp)) => {
            let (kind, code, rest) = (icmp.type_u8(), icmp.code_u8(), hex(&icmp.bytes5to8()));
            writeln!(text, "icmp {kind}/{code} rest {rest} sum {:04x}", icmp.checksum()).ok();
            icmp.payload()
        }
        Some(TransportSlice::Icmpv6(icmp)) => {
            let (kind, code, rest) = (icmp.type_u8(), icmp.code_u8(), hex(&icmp.bytes5to8()));
            writeln!(text, "icmpv6 {kind}/{code} rest {rest} sum {:04x}", icmp.checksum()).ok();
            icmp.payload()
        }
        Some(TransportSlice::Igmp(_)) | None => {
            packet.net.as_ref().and_then(|net| net.ip_payload_ref()).map_or(&[][..], |ip| ip.payload)
        }
    };
    writeln!(text, "payload {} bytes {}", payload.len(), hex(payload)).ok();
    writeln!(text, "frame {} bytes, checksums {}", frame.len(), verify(frame, false)).ok();
    text
}

/// Returns `None` if the frames are equal, otherwise both, with the lines that differ marked.
pub fn difference(expected: &[u8], found: &[u8]) -> Option<String> {
    if expected == found {
        return None;
    }
    let at = expected.iter().zip(found).position(|(a, b)| a != b).unwrap_or(expected.len().min(found.len()));
    let (wanted, got) = (render(expected), render(found));
    let mut text = format!("frames differ from byte {at} on\n");
    let (mut left, mut right) = (wanted.lines(), got.lines());
    loop {
        match (left.next(), right.next()) {
            (None, None) => return Some(text),
            (Some(a), Some(b)) if a == b => writeln!(text, "    {a}").unwrap_or_default(),
            (a, b) => {
                for (sign, line) in [('-', a), ('+', b)] {
                    if let Some(line) = line {
                        writeln!(text, "  {sign} {line}").ok();
                    }
                }
            }
        }
    }
}

fn hex(bytes: &[u8]) -> String {
    const SHOWN: usize = 96;
    let mut text = String::new();
    for byte in bytes.iter().take(SHOWN) {
        write!(text, "{byte:02x}").ok();
    }
    if bytes.len() > SHOWN {
        text.push('…');
    }
    text
}

fn mac(mac: Mac) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}
