//! A question to another node: whether packets that are forwarded to it directly arrive there, and
//! its answers here.
//!
//! The packet inside is a segment of a connection that nobody knows, from this node to a frontend.
//! The packet path of the other node opens it and answers RST with the frontend's address as
//! source; no pod gets to see it. So an answer shows that the network lets pass what the packet
//! travels in, and sources that are not the sender's own.

use std::{
    io,
    net::{IpAddr, SocketAddr, TcpListener, UdpSocket},
    time::{Duration, Instant},
};

use etherparse::{IpNumber, Ipv4Header, Ipv6Header, PacketBuilder, SlicedPacket, TransportSlice, UdpHeader};
use socket2::{Domain, Protocol, Socket, Type};
use traffic_policy_cluster::model::Dispatch;
use traffic_policy_ebpf::abi::{GUE_PORT, maglev, outer_port};

/// The segments that are sent, and the time for an answer to each.
const ROUNDS: u32 = 3;
const ROUND: Duration = Duration::from_millis(300);
/// ETH_P_ALL: linux/if_ether.h.
const EVERY_PROTOCOL: u16 = 3;
const TTL: u8 = 64;

/// A packet that travels directly to an endpoint of another node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirectProbe {
    /// The address of an endpoint.
    pub endpoint: IpAddr,
    /// A TCP frontend of a Service that has the endpoint, on an address that is not this node's.
    pub frontend: SocketAddr,
}

impl DirectProbe {
    /// Returns the address of this node from which the packets are sent.
    pub fn source(&self) -> io::Result<IpAddr> {
        let any: IpAddr = if self.endpoint.is_ipv4() { [0; 4].into() } else { [0; 16].into() };
        let socket = UdpSocket::bind((any, 0))?;
        socket.connect((self.endpoint, GUE_PORT.to_host()))?;
        Ok(socket.local_addr()?.ip())
    }

    /// Sends up to three segments, and returns whether one is answered. Blocks for up to a second.
    ///
    /// # Errors
    /// A socket is refused: CAP_NET_RAW is missing.
    pub fn is_answered(&self, dispatch: Dispatch) -> io::Result<bool> {
        // The port stays taken, so that nothing else here has the answer, and is never accepted on.
        let client = TcpListener::bind((self.source()?, 0))?.local_addr()?;
        let every = Protocol::from(i32::from(EVERY_PROTOCOL.to_be()));
        // The answer is seen before anything here may drop it.
        let ears = Socket::new(Domain::PACKET, Type::DGRAM, Some(every))?;
        let domain = if client.is_ipv4() { Domain::IPV4 } else { Domain::IPV6 };
        // IPPROTO_RAW: the packet has its IP header.
        let mouth = Socket::new(domain, Type::RAW, Some(Protocol::from(libc::IPPROTO_RAW)))?;
        let packet = self.packet(client, dispatch)?;
        for _ in 0..ROUNDS {
            mouth.send_to(&packet, &SocketAddr::new(self.endpoint, 0).into())?;
            let end = Instant::now() + ROUND;
            while let Some(left) = end.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) {
                ears.set_read_timeout(Some(left))?;
                let mut buffer = [0; 256];
                match io::Read::read(&mut &ears, &mut buffer) {
                    Ok(length) if self.is_answer(&buffer[..length], client) => return Ok(true),
                    _ => {}
                }
            }
        }
        Ok(false)
    }

    fn packet(&self, client: SocketAddr, dispatch: Dispatch) -> io::Result<Vec<u8>> {
        let inner = segment(client, self.frontend)?;
        let mut body = Vec::new();
        let protocol = match dispatch.within() {
            Dispatch::Udp => {
                let port = outer_port(u64::from(client.port()) << 16).to_host();
                let udp = UdpHeader::without_ipv4_checksum(port, GUE_PORT.to_host(), inner.len());
                body.extend(udp.map_err(io::Error::other)?.to_bytes());
                IpNumber::UDP
            }
            _ if client.is_ipv4() => IpNumber::IPV4,
            _ => IpNumber::IPV6,
        };
        body.extend(inner);
        let mut packet = header(client.ip(), self.endpoint, protocol, body.len())?;
        packet.extend(body);
        Ok(packet)
    }

    /// Whether an IP packet is the RST.
    fn is_answer(&self, packet: &[u8], client: SocketAddr) -> bool {
        let Ok(sliced) = SlicedPacket::from_ip(packet) else { return false };
        let from = match &sliced.net {
            Some(etherparse::NetSlice::Ipv4(ip)) => IpAddr::from(ip.header().source_addr()),
            Some(etherparse::NetSlice::Ipv6(ip)) => IpAddr::from(ip.header().source_addr()),
            _ => return false,
        };
        matches!(&sliced.transport, Some(TransportSlice::Tcp(tcp))
            if tcp.rst() && SocketAddr::new(from, tcp.source_port()) == self.frontend
                && tcp.destination_port() == client.port())
    }
}

/// Returns a segment with ACK that belongs to no connection.
fn segment(client: SocketAddr, frontend: SocketAddr) -> io::Result<Vec<u8>> {
    let builder = match (client.ip(), frontend.ip()) {
        (IpAddr::V4(from), IpAddr::V4(to)) => PacketBuilder::ipv4(from.octets(), to.octets(), TTL),
        (IpAddr::V6(from), IpAddr::V6(to)) => PacketBuilder::ipv6(from.octets(), to.octets(), TTL),
        _ => return Err(io::ErrorKind::InvalidInput.into()),
    };
    let tcp = builder.tcp(client.port(), frontend.port(), 1, 1024).ack(1);
    let mut packet = Vec::with_capacity(tcp.size(0));
    tcp.write(&mut packet, &[]).map_err(io::Error::other)?;
    Ok(packet)
}

/// Returns the outer IP header. It says that all owners were asked before, so that the other node
/// sends the packet to no third one.
fn header(from: IpAddr, to: IpAddr, protocol: IpNumber, length: usize) -> io::Result<Vec<u8>> {
    let length = u16::try_from(length).map_err(io::Error::other)?;
    match (from, to) {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            let header = Ipv4Header::new(length, TTL, protocol, from.octets(), to.octets());
            let mut header = header.map_err(io::Error::other)?;
            header.identification = maglev::FORMER as u16;
            header.dont_fragment = true;
            header.header_checksum = header.calc_header_checksum();
            Ok(header.to_bytes().to_vec())
        }
        (IpAddr::V6(source), IpAddr::V6(destination)) => {
            let header = Ipv6Header {
                payload_length: length,
                next_header: protocol,
                hop_limit: TTL,
                source: source.octets(),
                destination: destination.octets(),
                flow_label: etherparse::Ipv6FlowLabel::try_new(maglev::FORMER).map_err(io::Error::other)?,
                ..Ipv6Header::default()
            };
            Ok(header.to_bytes().to_vec())
        }
        _ => Err(io::ErrorKind::InvalidInput.into()),
    }
}
