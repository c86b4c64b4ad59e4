//! Associations of SCTP by raw sockets, so that no SCTP support in the kernel is needed. The
//! receiver computes the checksum of each packet in full. A packet with a wrong checksum is not
//! treated as lost: it is recorded.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::AsRawFd as _;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use nix::sys::socket::{SockaddrStorage, recvfrom};
use socket2::{Domain, Protocol, SockAddr, Socket, Type};
use traffic_policy_testing::checksum::crc32c;
use traffic_policy_testing::cluster::TARGET;
use traffic_policy_testing::lab::{Family, Pod};
use traffic_policy_testing::netns::Namespace;
use traffic_policy_testing::pace::scaled;
use traffic_policy_testing::packet::chunk::{
    COOKIE_ACK, COOKIE_ECHO, DATA, INIT, INIT_ACK, SHUTDOWN, SHUTDOWN_ACK, SHUTDOWN_COMPLETE,
};

/// Received packets with a wrong checksum, or truncated.
pub type Damaged = Mutex<Vec<String>>;

/// A packet with one chunk.
#[derive(Clone, Debug)]
struct Message {
    source: u16,
    destination: u16,
    tag: u32,
    kind: u8,
    value: Vec<u8>,
}

impl Message {
    fn bytes(&self) -> Vec<u8> {
        let length = u16::try_from(4 + self.value.len()).unwrap();
        let mut bytes = [self.source.to_be_bytes(), self.destination.to_be_bytes()].concat();
        bytes.extend(self.tag.to_be_bytes());
        bytes.extend([0; 4]);
        // The flags B and E of DATA: the chunk is a whole message. Other chunks have no such flags.
        bytes.extend([self.kind, if self.kind == DATA { 3 } else { 0 }]);
        bytes.extend(length.to_be_bytes());
        bytes.extend(&self.value);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        let sum = crc32c(&bytes).to_le_bytes();
        bytes[8..12].copy_from_slice(&sum);
        bytes
    }

    /// Parses a packet.
    ///
    /// # Errors
    /// A sentence that names the fault: the checksum, or the lengths.
    fn read(bytes: &[u8]) -> Result<Self, String> {
        let Some((sum, message)) = Self::parts(bytes) else { return Err(format!("cut: {bytes:02x?}")) };
        let computed = crc32c(&[&bytes[..8], &[0; 4], &bytes[12..]].concat()).to_le_bytes();
        if computed == sum {
            Ok(message)
        } else {
            Err(format!("CRC32c {sum:02x?} where {computed:02x?} is right: {message:?}"))
        }
    }

    /// Splits a packet into its checksum and the rest.
    fn parts(bytes: &[u8]) -> Option<([u8; 4], Self)> {
        let number = |at: usize| Some(u16::from_be_bytes(*bytes.get(at..)?.first_chunk()?));
        let word = |at: usize| Some(u32::from_be_bytes(*bytes.get(at..)?.first_chunk()?));
        let value = bytes.get(16..12 + usize::from(number(14)?))?.to_vec();
        let (source, destination, tag) = (number(0)?, number(2)?, word(4)?);
        Some((*bytes.get(8..)?.first_chunk()?, Self { source, destination, tag, kind: bytes[12], value }))
    }
}

fn raw(family: Family) -> Socket {
    let domain = if family == Family::V4 { Domain::IPV4 } else { Domain::IPV6 };
    let socket = Socket::new(domain, Type::RAW, Some(Protocol::from(132))).unwrap();
    socket.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
    socket
}

/// Receives the next packet, and returns its sender, too; `None` after the socket's time-out, and
/// for a damaged packet, which is recorded.
fn receive(socket: &Socket, family: Family, damaged: &Damaged) -> Option<(IpAddr, Message)> {
    let mut buffer = [0; 4096];
    let (length, from) = recvfrom::<SockaddrStorage>(socket.as_raw_fd(), &mut buffer).ok()?;
    let from = from?;
    let v4 = from.as_sockaddr_in().map(|address| IpAddr::from(address.ip()));
    let from = v4.or_else(|| from.as_sockaddr_in6().map(|address| IpAddr::from(address.ip())))?;
    let bytes = &buffer[..length];
    // A raw IPv4 socket receives the IP header, too.
    let header = if family == Family::V4 { usize::from(bytes.first()? & 15) * 4 } else { 0 };
    match Message::read(bytes.get(header..)?) {
        Ok(message) => Some((from, message)),
        Err(error) => {
            damaged.lock().unwrap().push(format!("from {from}: {error}"));
            None
        }
    }
}

fn send(socket: &Socket, to: IpAddr, message: &Message) {
    // An ICMP error about an earlier packet may be reported here.
    drop(socket.send_to(&message.bytes(), &SockAddr::from(SocketAddr::new(to, 0))));
}

/// Runs an endpoint in a pod, until `stop`. It answers DATA with the pod's name, the client's
/// address that it sees, and the length.
pub fn serve(pod: &Pod, family: Family, number: u32, stop: &AtomicBool, damaged: &Damaged) {
    let socket = raw(family);
    let own_tag = 0xe000_0000 | number;
    let mut clients: HashMap<SocketAddr, u32> = HashMap::new();
    while !stop.load(Relaxed) {
        let Some((from, asked)) = receive(&socket, family, damaged) else { continue };
        let client = SocketAddr::new(from, asked.source);
        if asked.destination != TARGET {
            continue;
        }
        let (kind, value) = match asked.kind {
            INIT if asked.tag == 0 => {
                let tag = u32::from_be_bytes(*asked.value.first_chunk().unwrap());
                clients.insert(client, tag);
                (INIT_ACK, [&own_tag.to_be_bytes()[..], &asked.value[4..]].concat())
            }
            COOKIE_ECHO if asked.tag == own_tag => (COOKIE_ACK, Vec::new()),
            DATA if asked.tag == own_tag => {
                (DATA, format!("{} {from} {}", pod.name, asked.value.len()).into_bytes())
            }
            SHUTDOWN if asked.tag == own_tag => (SHUTDOWN_ACK, Vec::new()),
            _ => continue,
        };
        let Some(tag) = clients.get(&client).copied() else { continue };
        send(&socket, from, &Message { source: TARGET, destination: asked.source, tag, kind, value });
    }
}

/// The client's side of an association.
pub struct Association<'a> {
    socket: Socket,
    damaged: &'a Damaged,
    family: Family,
    to: SocketAddr,
    pub port: u16,
    own_tag: u32,
    tag: u32,
}

impl<'a> Association<'a> {
    pub fn new(client: &Namespace, family: Family, to: SocketAddr, port: u16, damaged: &'a Damaged) -> Self {
        let own_tag = 0xc000_0000 | u32::from(port);
        Self { socket: client.run(|| raw(family)), damaged, family, to, port, own_tag, tag: 0 }
    }

    fn message(&self, kind: u8, value: &[u8]) -> Message {
        Message { source: self.port, destination: self.to.port(), tag: self.tag, kind, value: value.to_vec() }
    }

    /// Sends a packet, retransmits it if no answer comes, and returns the chunk of this type that
    /// answers it.
    fn ask(&self, asked: &Message, kind: u8, limit: Duration) -> Option<Vec<u8>> {
        let start = Instant::now();
        while start.elapsed() < limit {
            send(&self.socket, self.to.ip(), asked);
            while let Some((from, answer)) = receive(&self.socket, self.family, self.damaged) {
                let ours =
                    (from, answer.source, answer.destination) == (self.to.ip(), self.to.port(), self.port);
                if ours && answer.tag == self.own_tag && answer.kind == kind {
                    return Some(answer.value);
                }
            }
        }
        None
    }

    /// Whether an INIT is answered within half a second.
    pub fn is_welcome(&self) -> bool {
        self.ask(&self.init(), INIT_ACK, Duration::from_millis(500)).is_some()
    }

    fn init(&self) -> Message {
        let rest = [0, 1, 0, 0, 0, 10, 0, 10, 1, 2, 3, 4];
        let message = self.message(INIT, &[&self.own_tag.to_be_bytes()[..], &rest].concat());
        Message { tag: 0, ..message }
    }

    /// Runs an association from INIT to SHUTDOWN COMPLETE, and returns the endpoint's answers to
    /// data of each length.
    pub fn whole(mut self, lengths: &[usize]) -> Vec<String> {
        self.open();
        let said = lengths.iter().map(|length| self.say(*length)).collect();
        self.shut_down();
        said
    }

    /// The answer to a packet, sent again until it comes.
    fn answered(&self, asked: &Message, kind: u8) -> Vec<u8> {
        let answer = self.ask(asked, kind, scaled(Duration::from_secs(10)));
        answer.unwrap_or_else(|| panic!("{} from port {}: no answer to {asked:?}", self.to, self.port))
    }

    pub fn open(&mut self) {
        let answer = self.answered(&self.init(), INIT_ACK);
        self.tag = u32::from_be_bytes(*answer.first_chunk().unwrap());
        self.answered(&self.message(COOKIE_ECHO, &[7; 200]), COOKIE_ACK);
    }

    /// Sends data of a length, and returns what the endpoint says.
    pub fn say(&self, length: usize) -> String {
        String::from_utf8(self.answered(&self.message(DATA, &vec![9; length]), DATA)).unwrap()
    }

    pub fn shut_down(self) {
        self.answered(&self.message(SHUTDOWN, &[0; 4]), SHUTDOWN_ACK);
        send(&self.socket, self.to.ip(), &self.message(SHUTDOWN_COMPLETE, &[]));
    }
}

#[test]
fn a_wrong_checksum_is_told_from_silence() {
    let message = Message { source: 1, destination: 2, tag: 3, kind: DATA, value: vec![9; 30] };
    let whole = message.bytes();
    assert!(Message::read(&whole).is_ok());
    for bit in 0..whole.len() * 8 {
        let mut bytes = whole.clone();
        bytes[bit / 8] ^= 1 << (bit % 8);
        assert!(Message::read(&bytes).is_err(), "bit {bit}");
    }
    let namespace = Namespace::create(&format!("sctp-checksum-{}", std::process::id())).unwrap();
    namespace.netlink(async |net| net.up("lo").await).unwrap();
    for (family, address) in
        [(Family::V4, IpAddr::from(Ipv4Addr::LOCALHOST)), (Family::V6, IpAddr::from(Ipv6Addr::LOCALHOST))]
    {
        let (socket, damaged) = (namespace.run(|| raw(family)), Damaged::default());
        let mut bytes = whole.clone();
        bytes[8] ^= 1;
        socket.send_to(&bytes, &SockAddr::from(SocketAddr::new(address, 0))).unwrap();
        assert!(receive(&socket, family, &damaged).is_none());
        let noted = damaged.lock().unwrap().clone();
        assert!(noted.len() == 1 && noted[0].contains("CRC32c"), "{noted:?}");
        assert!(receive(&socket, family, &damaged).is_none(), "silence");
        assert_eq!(damaged.lock().unwrap().len(), 1);
    }
}
