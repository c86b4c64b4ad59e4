//! A question to another node: whether it answers what is forwarded to it directly, and in what.
//!
//! ```text
//! this node → endpoint [ this node → frontend ]   a segment of a connection that nobody has
//! frontend → this node                            RST, from the endpoint's node
//! endpoint's node → this node [ frontend → this node ]   the same, if replies are asked for here
//! ```
//!
//! The pod sees nothing of it, and no entry is made. The answer shows that the outer packet passes
//! the network, that the node opens it, and that the answer comes back: by itself it has a source
//! that is not the sender's own.

mod packet;
#[expect(unsafe_code, reason = "the address of a packet socket is a structure of C")]
mod station;

use std::{
    io,
    net::{IpAddr, SocketAddr, TcpListener, UdpSocket},
    time::{Duration, Instant},
};

use socket2::{Domain, Protocol, Socket, Type};
use traffic_policy_cluster::model::Dispatch;
use traffic_policy_ebpf::abi::GUE_PORT;

/// The segments that are sent, and the time for an answer to each.
const ROUNDS: u32 = 3;
const ROUND: Duration = Duration::from_millis(300);
/// linux/if_ether.h: ETH_P_ALL, ETH_P_IP, ETH_P_IPV6.
const EVERY_PROTOCOL: u16 = 3;
const IPV4: u16 = 0x0800;
const IPV6: u16 = 0x86dd;
/// The ports that are tried for one which fits.
const TRIES: u32 = 512;

/// A packet that travels directly to an endpoint of another node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirectProbe {
    /// The address of an endpoint.
    pub endpoint: IpAddr,
    /// A TCP frontend of a Service that has the endpoint, on an address that is not this node's.
    pub frontend: SocketAddr,
}

/// The way of a question.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProbeWay {
    /// Within an outer packet; the answer comes from the frontend.
    Within(Dispatch),
    /// The same, and the answer is asked to come back within an outer packet.
    AndBack(Dispatch),
    /// As it is, to the MAC address of a neighbour at this device.
    ByMac { link: u32, mac: [u8; 6] },
}

/// The answer to a question.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answered {
    No,
    /// From the frontend's address.
    AsItIs,
    /// Within an outer packet.
    Within,
}

impl DirectProbe {
    /// Returns the address of this node from which the packets are sent.
    pub fn source(&self) -> io::Result<IpAddr> {
        let any: IpAddr = if self.endpoint.is_ipv4() { [0; 4].into() } else { [0; 16].into() };
        let socket = UdpSocket::bind((any, 0))?;
        socket.connect((self.endpoint, GUE_PORT.to_host()))?;
        Ok(socket.local_addr()?.ip())
    }

    /// Sends up to three segments, and returns the answer. Blocks for up to a second.
    ///
    /// `length`: that of the packets on the wire in bytes, from the IP header on; `None`: as short
    /// as they can be. `fits`: whether a segment may come from this address and port; any may if
    /// none of many does.
    ///
    /// # Errors
    /// A socket is refused: CAP_NET_RAW is missing.
    pub fn ask(
        &self,
        way: ProbeWay,
        length: Option<usize>,
        fits: impl Fn(SocketAddr) -> bool,
    ) -> io::Result<Answered> {
        // The port stays taken, so that nothing else here has the answer, and is never accepted on.
        let taken = self.client(fits)?;
        let client = taken.local_addr()?;
        let every = Protocol::from(i32::from(EVERY_PROTOCOL.to_be()));
        // The answer is seen before anything here may drop or open it.
        let ears = Socket::new(Domain::PACKET, Type::DGRAM, Some(every))?;
        let packet = packet::question(client, self, way, length)?;
        let (mouth, to) = match way {
            ProbeWay::ByMac { link, mac } => {
                let protocol = if client.is_ipv4() { IPV4 } else { IPV6 };
                (Socket::new(Domain::PACKET, Type::DGRAM, None)?, station::of(link, mac, protocol)?)
            }
            ProbeWay::Within(_) | ProbeWay::AndBack(_) => {
                let domain = if client.is_ipv4() { Domain::IPV4 } else { Domain::IPV6 };
                // IPPROTO_RAW: the packet has its IP header.
                let mouth = Socket::new(domain, Type::RAW, Some(Protocol::from(libc::IPPROTO_RAW)))?;
                (mouth, SocketAddr::new(self.endpoint, 0).into())
            }
        };
        for _ in 0..ROUNDS {
            match mouth.send_to(&packet, &to) {
                // A route that has become narrower meanwhile.
                Err(error) if error.raw_os_error() == Some(libc::EMSGSIZE) => return Ok(Answered::No),
                sent => sent?,
            };
            let end = Instant::now() + ROUND;
            while let Some(left) = end.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) {
                ears.set_read_timeout(Some(left))?;
                let mut buffer = [0; 256];
                if let Ok(length) = io::Read::read(&mut &ears, &mut buffer) {
                    match packet::answer(&buffer[..length], self.frontend, client) {
                        Answered::No => {}
                        answered => return Ok(answered),
                    }
                }
            }
        }
        Ok(Answered::No)
    }

    fn client(&self, fits: impl Fn(SocketAddr) -> bool) -> io::Result<TcpListener> {
        let source = self.source()?;
        let mut taken = TcpListener::bind((source, 0))?;
        for _ in 0..TRIES {
            if fits(taken.local_addr()?) {
                break;
            }
            taken = TcpListener::bind((source, 0))?;
        }
        Ok(taken)
    }
}
