//! Verification of a frame's checksums, recomputed over the whole packet.

use std::fmt;

use etherparse::checksum::Sum16BitWords;
use etherparse::{IpNumber, NetSlice, SlicedPacket};

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Checksum {
    /// Every checksum was recomputed and is right.
    Valid,
    /// The checksum of the IP header is right; the other was left to a device to finish and cannot
    /// be verified.
    Unfinished,
    /// A checksum is wrong, or the packet is too malformed to compute it.
    Wrong(String),
    /// The packet is not IP, or is of a protocol, or a fragment, whose checksum cannot be computed
    /// from this packet alone.
    NotChecked,
}

impl fmt::Display for Checksum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Valid => f.write_str("valid"),
            Self::Unfinished => f.write_str("unfinished"),
            Self::Wrong(what) => write!(f, "WRONG: {what}"),
            Self::NotChecked => f.write_str("not checked"),
        }
    }
}

/// Verifies an Ethernet frame. `unfinished` is the kernel's information on the checksum of the
/// transport protocol.
pub fn verify(frame: &[u8], unfinished: bool) -> Checksum {
    let packet = match SlicedPacket::from_ethernet(frame) {
        Ok(packet) => packet,
        Err(error) => return Checksum::Wrong(format!("malformed: {error}")),
    };
    match &packet.net {
        Some(NetSlice::Ipv4(ip)) => {
            let header = ip.header();
            if Sum16BitWords::new().add_slice(header.slice()).ones_complement() != 0 {
                return Checksum::Wrong("IPv4 header".to_owned());
            }
            let addresses = Sum16BitWords::new().add_4bytes(header.source()).add_4bytes(header.destination());
            transport(addresses, ip.payload(), unfinished)
        }
        Some(NetSlice::Ipv6(ip)) => {
            let header = ip.header();
            let addresses =
                Sum16BitWords::new().add_16bytes(header.source()).add_16bytes(header.destination());
            transport(addresses, ip.payload(), unfinished)
        }
        Some(NetSlice::Arp(_)) | None => Checksum::NotChecked,
    }
}

fn transport(addresses: Sum16BitWords, ip: &etherparse::IpPayloadSlice<'_>, unfinished: bool) -> Checksum {
    let Ok(length) = u32::try_from(ip.payload.len()) else { return Checksum::NotChecked };
    let mut pseudo_header = addresses;
    pseudo_header = pseudo_header.add_4bytes(length.to_be_bytes()).add_2bytes([0, ip.ip_number.0]);
    let (name, start) = match ip.ip_number {
        IpNumber::TCP => ("TCP", pseudo_header),
        // Over IPv4, zero means that there is no checksum. Over IPv6 zero is wrong, and the sum
        // below shows it; except in a tunnel (RFC 6935).
        IpNumber::UDP if ip.payload.get(6..8) == Some(&[0, 0]) && (is_v4(ip) || is_tunnel(ip)) => {
            return Checksum::Valid;
        }
        IpNumber::UDP => ("UDP", pseudo_header),
        IpNumber::ICMP => ("ICMP", Sum16BitWords::new()),
        IpNumber::SCTP => ("SCTP", Sum16BitWords::new()),
        IpNumber::IPV6_ICMP => ("ICMPv6", pseudo_header),
        _ => return Checksum::NotChecked,
    };
    if ip.fragmented {
        return Checksum::NotChecked;
    }
    if unfinished {
        return Checksum::Unfinished;
    }
    if ip.ip_number == IpNumber::SCTP {
        return sctp(ip.payload);
    }
    match start.add_slice(ip.payload).ones_complement() {
        0 => Checksum::Valid,
        _ => Checksum::Wrong(name.to_owned()),
    }
}

/// Whether a datagram has a packet inside, by its destination port: GUE.
fn is_tunnel(ip: &etherparse::IpPayloadSlice<'_>) -> bool {
    ip.payload.get(2..4) == Some(&6080_u16.to_be_bytes())
}

/// Computes the CRC32c of RFC 9260 appendix A, bit by bit.
pub fn crc32c(bytes: &[u8]) -> u32 {
    let mut crc = u32::MAX;
    for byte in bytes {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            crc = crc >> 1 ^ if crc & 1 == 1 { 0x82f6_3b78 } else { 0 };
        }
    }
    !crc
}

fn sctp(packet: &[u8]) -> Checksum {
    let Some((head, [a, b, c, d, rest @ ..])) = packet.split_at_checked(8) else {
        return Checksum::Wrong("SCTP".to_owned());
    };
    let found = u32::from_le_bytes([*a, *b, *c, *d]);
    if crc32c(&[head, &[0; 4], rest].concat()) == found {
        Checksum::Valid
    } else {
        Checksum::Wrong("SCTP".to_owned())
    }
}

fn is_v4(ip: &etherparse::IpPayloadSlice<'_>) -> bool {
    matches!(ip.len_source, etherparse::LenSource::Ipv4HeaderTotalLen)
}

#[cfg(test)]
mod tests {
    use etherparse::PacketBuilder;

    use super::*;

    fn v4() -> etherparse::PacketBuilderStep<etherparse::IpHeaders> {
        PacketBuilder::ethernet2([2; 6], [4; 6]).ipv4([192, 0, 2, 10], [172, 18, 0, 11], 64)
    }

    fn v6() -> etherparse::PacketBuilderStep<etherparse::IpHeaders> {
        PacketBuilder::ethernet2([2; 6], [4; 6]).ipv6([1; 16], [2; 16], 64)
    }

    fn frames() -> Vec<Vec<u8>> {
        let payload = b"odd length of payload";
        let mut frames = vec![Vec::new(); 8];
        v4().tcp(1000, 80, 1, 1000).write(&mut frames[0], payload).unwrap();
        v6().tcp(1000, 80, 1, 1000).write(&mut frames[1], payload).unwrap();
        v4().udp(1000, 80).write(&mut frames[2], payload).unwrap();
        v6().udp(1000, 80).write(&mut frames[3], payload).unwrap();
        v4().icmpv4_echo_request(1, 2).write(&mut frames[4], payload).unwrap();
        v6().icmpv6_echo_request(1, 2).write(&mut frames[5], payload).unwrap();
        let sctp = [0x9c, 0x40, 0, 80, 1, 2, 3, 4, 0, 0, 0, 0, 11, 0, 0, 4];
        let sum = crc32c(&sctp).to_le_bytes();
        let sctp = [&sctp[..8], &sum, &sctp[12..]].concat();
        v4().write(&mut frames[6], IpNumber::SCTP, &sctp).unwrap();
        v6().write(&mut frames[7], IpNumber::SCTP, &sctp).unwrap();
        frames
    }

    /// The examples of RFC 3720 appendix B.4.
    #[test]
    fn crc32c_is_the_one_of_the_rfc() {
        assert_eq!(crc32c(&[0; 32]).to_le_bytes(), [0xaa, 0x36, 0x91, 0x8a]);
        let counted: Vec<u8> = (0..32).collect();
        assert_eq!(crc32c(&counted).to_le_bytes(), [0x4e, 0x79, 0xdd, 0x46]);
    }

    #[test]
    fn each_protocol_is_judged() {
        for mut frame in frames() {
            assert_eq!(verify(&frame, false), Checksum::Valid, "{frame:x?}");
            *frame.last_mut().unwrap() ^= 1;
            assert!(matches!(verify(&frame, false), Checksum::Wrong(_)), "{frame:x?}");
            assert_eq!(verify(&frame, true), Checksum::Unfinished, "{frame:x?}");
        }
    }

    #[test]
    fn the_ipv4_header_is_judged_even_if_the_rest_is_unfinished() {
        let mut frame = frames().remove(0);
        frame[14 + 8] -= 1;
        assert_eq!(verify(&frame, true), Checksum::Wrong("IPv4 header".to_owned()));
    }

    #[test]
    fn udp_without_a_checksum_is_right_over_ipv4_only() {
        let mut frames = frames();
        frames[2][14 + 20 + 6..][..2].fill(0);
        frames[3][14 + 40 + 6..][..2].fill(0);
        assert_eq!(verify(&frames[2], false), Checksum::Valid);
        assert_eq!(verify(&frames[3], false), Checksum::Wrong("UDP".to_owned()));
    }
}
