//! Requests to sock_diag(7) about IPv4 and IPv6 sockets, and its replies, as payloads of a
//! [`Connection`][super::netlink::Connection].

use netlink_packet_core::{Emitable as _, Parseable as _};
use netlink_packet_sock_diag::inet::{ExtensionFlags, InetRequest, InetResponseHeader};
pub use netlink_packet_sock_diag::{
    SOCK_DESTROY, SOCK_DIAG_BY_FAMILY,
    constants::{AF_INET, AF_INET6, IPPROTO_TCP, IPPROTO_UDP},
    inet::{SocketId, StateFlags},
};

/// Returns a request for sockets, or for the one socket with this id.
pub fn request(family: u8, protocol: u8, states: StateFlags, socket_id: SocketId) -> Vec<u8> {
    let request = InetRequest { family, protocol, extensions: ExtensionFlags::empty(), states, socket_id };
    let mut bytes = vec![0; request.buffer_len()];
    request.emit(&mut bytes);
    bytes
}

/// Returns the id of the socket that a message of a reply is about. What follows the message's
/// fixed part was not asked for.
pub fn socket_id(payload: &[u8]) -> Option<SocketId> {
    InetResponseHeader::parse(payload).ok().map(|header| header.socket_id)
}
