//! ICMP echo, which tests reachability without a server.

use std::io::Read;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use etherparse::checksum::Sum16BitWords;
use socket2::{Domain, Protocol, Socket, Type};

use crate::netns::Namespace;

/// The interval between requests: one may be lost while a neighbour is resolved or a link comes up.
const AGAIN: Duration = Duration::from_millis(500);

impl Namespace {
    /// Sends an echo request every half second and waits for the first reply. Returns the time
    /// until then.
    pub fn ping(&self, address: IpAddr, limit: Duration) -> Result<Duration> {
        self.run(|| ping(address, limit)).with_context(|| format!("ping from {} to {address}", self.name()))
    }
}

fn ping(address: IpAddr, limit: Duration) -> Result<Duration> {
    let (domain, protocol, request_type) = match address {
        IpAddr::V4(_) => (Domain::IPV4, Protocol::ICMPV4, 8),
        IpAddr::V6(_) => (Domain::IPV6, Protocol::ICMPV6, 128),
    };
    let mut socket = Socket::new(domain, Type::RAW, Some(protocol))?;
    socket.connect(&SocketAddr::new(address, 0).into())?;
    let identifier = (std::process::id() as u16).to_be_bytes();
    let mut request = [request_type, 0, 0, 0, identifier[0], identifier[1], 0, 1];
    // For ICMPv6 the kernel overwrites it, since it needs the source address.
    let checksum = Sum16BitWords::new().add_slice(&request).ones_complement();
    request[2..4].copy_from_slice(&checksum.to_ne_bytes());
    let start = Instant::now();
    let mut sent = 0;
    let mut buffer = [0; 2048];
    loop {
        let left = limit.checked_sub(start.elapsed()).filter(|left| !left.is_zero()).context("no reply")?;
        if start.elapsed() >= AGAIN * sent {
            socket.send(&request)?;
            sent += 1;
        }
        socket.set_read_timeout(Some(left.min(AGAIN)))?;
        let length = match socket.read(&mut buffer) {
            Ok(length) => length,
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => continue,
            Err(error) => return Err(error.into()),
        };
        // A raw IPv4 socket receives the IP header, too.
        let header = if address.is_ipv4() { usize::from(buffer[0] & 0xf) * 4 } else { 0 };
        let reply = buffer.get(header..length).unwrap_or_default();
        let reply_type = if address.is_ipv4() { 0 } else { 129 };
        let ours = reply.first() == Some(&reply_type) && reply.get(4..6) == Some(&identifier);
        if ours {
            ensure!(reply.get(6..8) == Some(&[0, 1]), "a reply to another request");
            return Ok(start.elapsed());
        }
    }
}
