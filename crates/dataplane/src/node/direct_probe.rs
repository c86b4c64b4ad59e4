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
pub mod station;
mod tap;

use std::{
    collections::HashMap,
    hash::{BuildHasher as _, RandomState},
    io,
    net::{IpAddr, SocketAddr, TcpListener, UdpSocket},
    time::{Duration, Instant},
};

use socket2::{Domain, Protocol, SockAddr, Socket, Type};
use traffic_policy_cluster::model::{DirectTarget, Dispatch};
use traffic_policy_ebpf::abi::GUE_PORT;

/// The segments that are sent, and the time for an answer to each.
const ROUNDS: u32 = 3;
const ROUND: Duration = Duration::from_millis(300);
/// linux/if_ether.h: ETH_P_IP, ETH_P_IPV6.
const IPV4: u16 = 0x0800;
const IPV6: u16 = 0x86dd;
/// The ports that are tried for one which fits.
const TRIES: u32 = 512;

/// The way of a question.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProbeWay {
    /// The segment is sent within an outer packet; the answer comes from the frontend.
    Within(Dispatch),
    /// The same, and the answer is asked to come back within an outer packet.
    AndBack(Dispatch),
    /// The segment is sent as it is, to the MAC address of a neighbour at this device.
    ByMac { link: u32, mac: [u8; 6] },
}

impl ProbeWay {
    /// Questions within IP and within UDP: first those whose answers come as they are, then those
    /// whose answers are to come back within an outer packet.
    pub const WITHIN: [Self; 4] = [
        Self::Within(Dispatch::Ipip),
        Self::Within(Dispatch::Udp),
        Self::AndBack(Dispatch::Ipip),
        Self::AndBack(Dispatch::Udp),
    ];
}

/// The answer to a question.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answered {
    No,
    /// The answer came from the frontend's address.
    AsItIs,
    /// The answer came within an outer packet.
    Within,
}

/// A packet that is ready to be sent, and the sockets for it.
pub struct Question {
    answer: packet::Reset,
    packet: Vec<u8>,
    sender: Socket,
    to: SockAddr,
    /// The client's port stays taken, so that nothing else here has the answer, and is never
    /// accepted on.
    _taken: TcpListener,
}

impl Question {
    /// Returns the question whether the node of an endpoint gets what is sent in this way.
    ///
    /// `length`: that of the packet on the wire in bytes, from the IP header on; `None`: as short
    /// as it can be. `fits`: whether it may come from this address and port; any may if none of
    /// many does.
    ///
    /// # Errors
    /// There is no route, or a socket is refused: CAP_NET_RAW is missing.
    pub fn new(
        target: &DirectTarget,
        way: ProbeWay,
        length: Option<usize>,
        fits: impl Fn(SocketAddr) -> bool,
    ) -> io::Result<Self> {
        let taken = client(target.endpoint, fits)?;
        let client = taken.local_addr()?;
        // The answer has it, so that none can be forged without seeing the packet.
        let number = RandomState::new().hash_one(client) as u32;
        let packet = packet::question(client, target, (way, number), length)?;
        let (sender, to) = match way {
            ProbeWay::ByMac { link, mac } => {
                let protocol = if client.is_ipv4() { IPV4 } else { IPV6 };
                (Socket::new(Domain::PACKET, Type::DGRAM, None)?, station::of(link, mac, protocol)?)
            }
            ProbeWay::Within(_) | ProbeWay::AndBack(_) => {
                let domain = if client.is_ipv4() { Domain::IPV4 } else { Domain::IPV6 };
                // IPPROTO_RAW: the packet has its IP header.
                let sender = Socket::new(domain, Type::RAW, Some(Protocol::from(libc::IPPROTO_RAW)))?;
                (sender, SocketAddr::new(target.endpoint, 0).into())
            }
        };
        let answer = packet::Reset { frontend: target.frontend, client, number };
        Ok(Self { answer, packet, sender, to, _taken: taken })
    }

    fn send(&self) -> io::Result<()> {
        match self.sender.send_to(&self.packet, &self.to) {
            // A route that has become narrower meanwhile: nobody can answer.
            Err(error) if error.raw_os_error() == Some(libc::EMSGSIZE) => Ok(()),
            sent => sent.map(drop),
        }
    }
}

/// Sends up to three segments for each question, and returns the answers in their order. Blocks for
/// up to a second in all.
///
/// # Errors
/// A socket is refused: CAP_NET_RAW is missing. The error of one answer: its segment cannot be
/// sent.
pub fn ask(questions: &[Question]) -> io::Result<Vec<io::Result<Answered>>> {
    let tap = tap::open()?;
    let mut answers: Vec<_> = questions.iter().map(|_| Ok(Answered::No)).collect();
    let mut open: HashMap<_, _> =
        questions.iter().enumerate().map(|(number, question)| (question.answer, number)).collect();
    for _ in 0..ROUNDS {
        open.retain(|_, number| match questions[*number].send() {
            Ok(()) => true,
            Err(error) => {
                answers[*number] = Err(error);
                false
            }
        });
        let end = Instant::now() + ROUND;
        while !open.is_empty() {
            let Some(left) = end.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) else {
                break;
            };
            tap.set_read_timeout(Some(left))?;
            let mut buffer = [0; 256];
            let read = io::Read::read(&mut &tap, &mut buffer);
            if let Some((reset, answered)) = read.ok().and_then(|length| packet::answer(&buffer[..length]))
                && let Some(number) = open.remove(&reset)
            {
                answers[number] = Ok(answered);
            }
        }
    }
    Ok(answers)
}

/// Returns the address of this node from which packets to an endpoint are sent.
fn source(endpoint: IpAddr) -> io::Result<IpAddr> {
    let any: IpAddr = if endpoint.is_ipv4() { [0; 4].into() } else { [0; 16].into() };
    let socket = UdpSocket::bind((any, 0))?;
    socket.connect((endpoint, GUE_PORT.to_host()))?;
    Ok(socket.local_addr()?.ip())
}

fn client(endpoint: IpAddr, fits: impl Fn(SocketAddr) -> bool) -> io::Result<TcpListener> {
    let source = source(endpoint)?;
    let mut taken = TcpListener::bind((source, 0))?;
    for _ in 0..TRIES {
        if fits(taken.local_addr()?) {
            break;
        }
        taken = TcpListener::bind((source, 0))?;
    }
    Ok(taken)
}
