//! ICMP echo by a socket of its own for each address.
//!
//! The agent gives up CAP_NET_RAW, so it takes a ping socket, which `net.ipv4.ping_group_range`
//! must allow (systemd does); a raw socket serves where that fails and the process may.

use std::{
    io::{self, Read as _},
    net::{IpAddr, SocketAddr},
    os::fd::{AsFd, BorrowedFd},
};

use etherparse::checksum::Sum16BitWords;
use socket2::{Domain, Protocol, Socket, Type};

/// The types of requests and replies: RFC 792, RFC 4443.
const TYPES: [[u8; 2]; 2] = [[8, 0], [128, 129]];

/// A socket that is connected to one address, so that it receives nothing of others.
#[derive(Debug)]
pub struct Echo {
    pub address: IpAddr,
    socket: Socket,
    /// Whether the socket is raw: what it receives in IPv4 begins with the IP header.
    raw: bool,
    sequence: u16,
}

impl Echo {
    pub fn open(address: IpAddr) -> io::Result<Self> {
        let (domain, protocol) = match address {
            IpAddr::V4(_) => (Domain::IPV4, Protocol::ICMPV4),
            IpAddr::V6(_) => (Domain::IPV6, Protocol::ICMPV6),
        };
        let (socket, raw) = match Socket::new(domain, Type::DGRAM, Some(protocol)) {
            Ok(socket) => (socket, false),
            Err(refusal) => (Socket::new(domain, Type::RAW, Some(protocol)).map_err(|_| refusal)?, true),
        };
        socket.set_nonblocking(true)?;
        socket.connect(&SocketAddr::new(address, 0).into())?;
        Ok(Self { address, socket, raw, sequence: 0 })
    }

    pub fn send(&mut self) -> io::Result<()> {
        self.sequence += 1;
        let [request, _] = TYPES[usize::from(self.address.is_ipv6())];
        let mut message = [request, 0, 0, 0, 0, 0, 0, 0];
        message[4..6].copy_from_slice(&(std::process::id() as u16).to_be_bytes());
        message[6..].copy_from_slice(&self.sequence.to_be_bytes());
        // The kernel writes a ping socket's identifier, and the checksums of all but raw IPv4.
        let checksum = Sum16BitWords::new().add_slice(&message).ones_complement();
        message[2..4].copy_from_slice(&checksum.to_ne_bytes());
        self.socket.send(&message).map(drop)
    }

    /// Reads all that has arrived. The reply to another process's request is a sign of life, too.
    pub fn is_answered(&mut self) -> bool {
        let mut buffer = [0; 256];
        loop {
            match (&self.socket).read(&mut buffer) {
                Ok(length) => {
                    let header =
                        if self.raw && self.address.is_ipv4() { usize::from(buffer[0] & 0xf) * 4 } else { 0 };
                    let [_, reply] = TYPES[usize::from(self.address.is_ipv6())];
                    if buffer.get(header..length).and_then(|message| message.first()) == Some(&reply) {
                        return true;
                    }
                }
                // Nothing is there, or only an error that a router reported.
                Err(_) => return false,
            }
        }
    }
}

impl AsFd for Echo {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
