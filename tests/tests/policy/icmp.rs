//! ICMP errors among captured frames.

use std::net::SocketAddr;

use traffic_policy_testing::capture::Frame;

/// Returns type and code of an ICMP error from `to` about a packet to `to`.
pub fn error_about(frame: &Frame, to: SocketAddr) -> Option<(u8, u8)> {
    let bytes = &frame.bytes;
    let (protocol, source, icmp, quoted_port) = match to {
        SocketAddr::V4(_) if bytes[12..14] == [8, 0] => (1, 26..30, 34, 34 + 8 + 20 + 2),
        SocketAddr::V6(_) if bytes[12..14] == [0x86, 0xdd] => (58, 22..38, 54, 54 + 8 + 40 + 2),
        _ => return None,
    };
    let address = match to {
        SocketAddr::V4(to) => to.ip().octets().to_vec(),
        SocketAddr::V6(to) => to.ip().octets().to_vec(),
    };
    let found = if to.is_ipv4() { bytes[23] } else { bytes[20] };
    let ours = found == protocol && bytes[source] == address;
    (ours && bytes[quoted_port..quoted_port + 2] == to.port().to_be_bytes())
        .then(|| (bytes[icmp], bytes[icmp + 1]))
}

/// Whether a frame is a TCP segment or datagram to `to`.
pub fn is_to(frame: &Frame, to: SocketAddr) -> bool {
    let bytes = &frame.bytes;
    let (found, port) = match to {
        SocketAddr::V4(to) => (bytes[12..14] == [8, 0] && bytes[30..34] == to.ip().octets(), 36),
        SocketAddr::V6(to) => (bytes[12..14] == [0x86, 0xdd] && bytes[38..54] == to.ip().octets(), 56),
    };
    found && frame.outgoing && bytes[port..port + 2] == to.port().to_be_bytes()
}
