//! SCTP from outside, through agents, devices and stacks: both policies, both families, endpoints on this node and on
//! another.
//!
//! Client and endpoints speak it by raw sockets, so that a kernel without SCTP will do. The receiver computes the
//! checksum of each packet in full, and ignores a packet with a wrong one.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsRawFd as _;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::socket::{SockaddrStorage, recvfrom};
use serde_json::json;
use socket2::{Domain, Protocol, SockAddr, Socket, Type};
use traffic_policy_testing::agent::Agent;
use traffic_policy_testing::checksum::crc32c;
use traffic_policy_testing::cluster::{Cluster, TARGET};
use traffic_policy_testing::lab::{Family, Lab, Pod};
use traffic_policy_testing::netns::Namespace;
use traffic_policy_testing::object::{Backend, Policy, Port, Service};
use traffic_policy_testing::pace::scaled;
use traffic_policy_testing::packet::chunk::{
    COOKIE_ACK, COOKIE_ECHO, DATA, INIT, INIT_ACK, SHUTDOWN, SHUTDOWN_ACK, SHUTDOWN_COMPLETE,
};

const CLUSTER: u16 = 30_090;
const LOCAL: u16 = 30_091;

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

    /// `None` if the checksum is wrong or the packet is cut.
    fn read(bytes: &[u8]) -> Option<Self> {
        let number = |at: usize| Some(u16::from_be_bytes(*bytes.get(at..)?.first_chunk()?));
        let word = |at: usize| Some(u32::from_be_bytes(*bytes.get(at..)?.first_chunk()?));
        let sum = bytes.get(8..12)?;
        if crc32c(&[bytes.get(..8)?, &[0; 4], bytes.get(12..)?].concat()).to_le_bytes() != *sum {
            return None;
        }
        let value = bytes.get(16..12 + usize::from(number(14)?))?.to_vec();
        Some(Self { source: number(0)?, destination: number(2)?, tag: word(4)?, kind: bytes[12], value })
    }
}

fn raw(family: Family) -> Socket {
    let domain = if family == Family::V4 { Domain::IPV4 } else { Domain::IPV6 };
    let socket = Socket::new(domain, Type::RAW, Some(Protocol::from(132))).unwrap();
    socket.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
    socket
}

/// The next packet, and its sender; `None` after the socket's time-out, and for bytes that are no packet.
fn receive(socket: &Socket, family: Family) -> Option<(IpAddr, Message)> {
    let mut buffer = [0; 4096];
    let (length, from) = recvfrom::<SockaddrStorage>(socket.as_raw_fd(), &mut buffer).ok()?;
    let from = from?;
    let v4 = from.as_sockaddr_in().map(|address| IpAddr::from(address.ip()));
    let from = v4.or_else(|| from.as_sockaddr_in6().map(|address| IpAddr::from(address.ip())))?;
    let bytes = &buffer[..length];
    // A raw IPv4 socket gets the IP header too.
    let header = if family == Family::V4 { usize::from(bytes.first()? & 15) * 4 } else { 0 };
    Some((from, Message::read(bytes.get(header..)?)?))
}

fn send(socket: &Socket, to: IpAddr, message: &Message) {
    // An ICMP error about an earlier packet may be reported here.
    drop(socket.send_to(&message.bytes(), &SockAddr::from(SocketAddr::new(to, 0))));
}

/// An endpoint in a pod, until `stop`. It answers DATA with the pod's name, the client's address that it sees, and the
/// length.
fn serve(pod: &Pod, family: Family, number: u32, stop: &AtomicBool) {
    let socket = raw(family);
    let own_tag = 0xe000_0000 | number;
    let mut clients: HashMap<SocketAddr, u32> = HashMap::new();
    while !stop.load(Relaxed) {
        let Some((from, asked)) = receive(&socket, family) else { continue };
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

/// A client's association.
struct Association {
    socket: Socket,
    family: Family,
    to: SocketAddr,
    port: u16,
    own_tag: u32,
    tag: u32,
}

impl Association {
    fn new(client: &Namespace, family: Family, to: SocketAddr, port: u16) -> Self {
        let own_tag = 0xc000_0000 | u32::from(port);
        Self { socket: client.run(|| raw(family)), family, to, port, own_tag, tag: 0 }
    }

    fn message(&self, kind: u8, value: &[u8]) -> Message {
        Message { source: self.port, destination: self.to.port(), tag: self.tag, kind, value: value.to_vec() }
    }

    /// Sends a packet, again where nothing comes, and gives the chunk of this type that answers it.
    fn ask(&self, asked: &Message, kind: u8, limit: Duration) -> Option<Vec<u8>> {
        let start = Instant::now();
        while start.elapsed() < limit {
            send(&self.socket, self.to.ip(), asked);
            while let Some((from, answer)) = receive(&self.socket, self.family) {
                let ours =
                    (from, answer.source, answer.destination) == (self.to.ip(), self.to.port(), self.port);
                if ours && answer.tag == self.own_tag && answer.kind == kind {
                    return Some(answer.value);
                }
            }
        }
        None
    }

    fn init(&self) -> Message {
        let rest = [0, 1, 0, 0, 0, 10, 0, 10, 1, 2, 3, 4];
        let message = self.message(INIT, &[&self.own_tag.to_be_bytes()[..], &rest].concat());
        Message { tag: 0, ..message }
    }

    /// From INIT to SHUTDOWN COMPLETE: what the endpoint said to data of each length.
    fn whole(mut self, lengths: &[usize]) -> Vec<String> {
        let limit = scaled(Duration::from_secs(10));
        let what = format!("{} from port {}", self.to, self.port);
        let answer = self.ask(&self.init(), INIT_ACK, limit).unwrap_or_else(|| panic!("{what}: no INIT ACK"));
        self.tag = u32::from_be_bytes(*answer.first_chunk().unwrap());
        self.ask(&self.message(COOKIE_ECHO, &[7; 200]), COOKIE_ACK, limit).expect(&what);
        let said = lengths.iter().map(|length| {
            let answer = self.ask(&self.message(DATA, &vec![9; *length]), DATA, limit).expect(&what);
            String::from_utf8(answer).unwrap()
        });
        let said = said.collect();
        self.ask(&self.message(SHUTDOWN, &[0; 4]), SHUTDOWN_ACK, limit).expect(&what);
        send(&self.socket, self.to.ip(), &self.message(SHUTDOWN_COMPLETE, &[]));
        said
    }
}

fn service(name: &str, policy: Policy, node_port: u16) -> Service {
    Service::new(name).policy(policy).port(Port::sctp(80, TARGET).node_port(node_port))
}

fn associations(attach: &str) {
    let cluster = Cluster::start(Lab::builder().pods(&[1, 1])).unwrap();
    let lab = &cluster.lab;
    let elsewhere: Vec<_> = lab.pods().filter(|pod| pod.name == "pod-2-1").map(Backend::of).collect();
    cluster.manifests.apply(&service("cluster", Policy::Cluster, CLUSTER), &cluster.backends()).unwrap();
    cluster.manifests.apply(&service("local", Policy::Local, LOCAL), &elsewhere).unwrap();
    // Flows that have ended are counted at the end, which may come later than the default of 10 s.
    let kept = ["--idle-reset", "1h"];
    let agents = Agent::start_all(lab, |agent| agent.attach(attach).flags(&kept)).unwrap();
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        for (number, pod) in (1..).zip(lab.pods()) {
            for family in Family::BOTH {
                let stop = &stop;
                scope.spawn(move || pod.netns().run(|| serve(pod, family, number, stop)));
            }
        }
        let ended =
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| ask_all(&cluster, &agents, attach)));
        stop.store(true, Relaxed);
        ended.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    });
}

fn ask_all(cluster: &Cluster, agents: &[Agent], attach: &str) {
    let lab = &cluster.lab;
    let client = lab.client().netns();
    let mut ports = 41_000..;
    for family in Family::BOTH {
        // Enough for both endpoints to be chosen: in four of a million runs one of them is not.
        let mut seen: HashMap<String, String> = HashMap::new();
        for _ in 0..20 {
            let association =
                Association::new(client, family, cluster.at(1, family, CLUSTER), ports.next().unwrap());
            let said = association.whole(&[1, 300, 1200]);
            let words: Vec<Vec<&str>> = said.iter().map(|line| line.split(' ').collect()).collect();
            for (line, length) in words.iter().zip(["1", "300", "1200"]) {
                assert_eq!(
                    *line,
                    [words[0][0], words[0][1], length],
                    "one endpoint for one association: {said:?}"
                );
            }
            seen.insert(words[0][0].to_owned(), words[0][1].to_owned());
        }
        let here = lab.client().address(family).to_string();
        let there = lab.source_towards_pods(lab.node(1), family).to_string();
        let expected = [("pod-1-1".to_owned(), here.clone()), ("pod-2-1".to_owned(), there)];
        assert_eq!(seen, HashMap::from(expected), "{attach} {family:?}");

        let association =
            Association::new(client, family, cluster.at(2, family, LOCAL), ports.next().unwrap());
        assert_eq!(association.whole(&[100]), [format!("pod-2-1 {here} 100")], "{attach} {family:?}");
        let nobody = Association::new(client, family, cluster.at(1, family, LOCAL), ports.next().unwrap());
        assert_eq!(nobody.ask(&nobody.init(), INIT_ACK, Duration::from_millis(500)), None);
    }
    let hook = if attach == "tc" { "tc-ingress" } else { "xdp" };
    assert!(agents[0].packets(hook, "forwarded").unwrap() > 0);
    assert!(agents[0].packets(hook, "dropped-no-local-endpoint").unwrap() >= 2);
    let flows = agents[0].json(&["flows"]).unwrap();
    let flows: Vec<_> =
        flows.as_array().unwrap().iter().map(|flow| (&flow["protocol"], &flow["state"])).collect();
    let ended = (&json!("SCTP"), &json!("reset"));
    assert!(flows.len() == 40 && flows.iter().all(|flow| *flow == ended), "SHUTDOWN COMPLETE: {flows:?}");
    let source = lab.client().address(Family::V4).to_string();
    let to = format!("{}/sctp", cluster.at(1, Family::V4, LOCAL));
    let explained = agents[0].command(&["explain", &source, &to]).unwrap();
    let explained = String::from_utf8_lossy(&explained.stdout).into_owned();
    assert!(explained.contains("dropped-no-local-endpoint") && explained.contains("/SCTP"), "{explained}");
}

#[test]
fn by_tc() {
    associations("tc");
}

#[test]
fn by_xdp() {
    associations("xdp");
}
