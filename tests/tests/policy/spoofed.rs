//! An off-path attacker, who knows addresses and ports of connections but sees none of their
//! packets, cannot end them: real sockets, and segments with forged sources from the router. Nor
//! can a datagram with a forged source start a storm.

use std::io::{BufRead, BufReader, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::time::Duration;

use serde_json::Value;
use socket2::{Domain, Protocol as Number, SockAddr, SockRef, Socket, Type};
use traffic_policy_testing::agent::{Agent, AgentBuilder};
use traffic_policy_testing::cluster::{Cluster, Protocol};
use traffic_policy_testing::lab::{Family, Lab};
use traffic_policy_testing::object::Policy;
use traffic_policy_testing::pace::{scaled, until};
use traffic_policy_testing::packet::{Packet, flag};
use traffic_policy_testing::traffic::Answer;

const PORT: u16 = 30_080;
const CONNECTIONS: usize = 12;
/// The number of sequence numbers that are tried in each direction, with each combination of flags.
const GUESSES: u32 = 24;
const PATIENCE: Duration = Duration::from_secs(60);

/// A client's connection, and its pod.
pub struct Connection {
    pub stream: BufReader<TcpStream>,
    pub pod: String,
}

impl Connection {
    pub fn open(cluster: &Cluster, to: SocketAddr) -> Self {
        let stream = cluster.lab.client().netns().run(|| TcpStream::connect(to)).unwrap();
        stream.set_read_timeout(Some(scaled(PATIENCE))).unwrap();
        let mut connection = Self { stream: BufReader::new(stream), pod: String::new() };
        connection.pod = connection.ask("hello").unwrap().pod;
        connection
    }

    pub fn ask(&mut self, text: &str) -> anyhow::Result<Answer> {
        self.stream.get_mut().write_all(format!("{text}\n").as_bytes())?;
        let mut line = String::new();
        anyhow::ensure!(self.stream.read_line(&mut line)? > 0, "closed by the other side");
        Answer::parse(&line)
    }

    pub fn client(&self) -> SocketAddr {
        self.stream.get_ref().local_addr().unwrap()
    }
}

/// Sends raw IP packets.
pub struct Stranger {
    v4: Socket,
    v6: Socket,
}

impl Stranger {
    pub fn at(cluster: &Cluster) -> Self {
        cluster.lab.router().run(|| {
            let raw = |domain| Socket::new(domain, Type::RAW, Some(Number::from(libc::IPPROTO_RAW))).unwrap();
            Self { v4: raw(Domain::IPV4), v6: raw(Domain::IPV6) }
        })
    }

    pub fn send(&self, packet: &Packet) {
        let frame = packet.bytes();
        let socket = if packet.destination.is_ipv4() { &self.v4 } else { &self.v6 };
        let to = SockAddr::from(SocketAddr::new(packet.destination, 0));
        socket.send_to(&frame[14..], &to).unwrap();
    }

    /// Sends segments with numbers all over the circle; the right ones are somewhere in between.
    fn attack(&self, from: SocketAddr, to: SocketAddr, seed: u32) {
        let (from, to): ((IpAddr, u16), (IpAddr, u16)) = ((from.ip(), from.port()), (to.ip(), to.port()));
        let step = u32::MAX / GUESSES;
        for flags in [flag::RST, flag::RST | flag::ACK, flag::FIN | flag::ACK, flag::SYN] {
            for guess in 0..GUESSES {
                let number = seed.wrapping_add(guess * step);
                self.send(&Packet::tcp(from, to, flags).numbers(number, number.rotate_left(16)));
            }
        }
    }
}

fn flows(agent: &Agent) -> Vec<Value> {
    agent.json(&["flows"]).unwrap().as_array().unwrap().clone()
}

fn socket(flow: &Value, end: &str) -> SocketAddr {
    flow[end].as_str().unwrap().parse().unwrap()
}

fn strangers_do_nothing(attach: &str, hook: &str) {
    let cluster = Cluster::start(Lab::builder().pods(&[1, 1])).unwrap();
    cluster.manifests.apply(&Cluster::node_port("web", Policy::Cluster, PORT), &cluster.backends()).unwrap();
    let adapt = |agent: AgentBuilder| agent.attach(attach).flags(&["--idle-reset", "1s"]);
    let agents = Agent::start_first(1, &cluster.lab, adapt).unwrap();
    let stranger = Stranger::at(&cluster);
    strangers_end_nothing(&cluster, &agents[0], &stranger, attach);
    a_datagram_makes_no_storm(&cluster, &agents[0], &stranger, attach, hook);
}

fn strangers_end_nothing(cluster: &Cluster, agent: &Agent, stranger: &Stranger, attach: &str) {
    for family in Family::BOTH {
        let to = cluster.at(1, family, PORT);
        cluster.ask_until_all(Protocol::Tcp, to, &["pod-1-1", "pod-2-1"]).unwrap();
        let mut connections: Vec<_> = (0..CONNECTIONS).map(|_| Connection::open(cluster, to)).collect();
        // A connection that is really reset shows when its effects are complete.
        let reset = Connection::open(cluster, to);
        let known = flows(agent);
        let flow_of =
            |client: SocketAddr| known.iter().find(|flow| socket(flow, "client") == client).unwrap();
        let held: Vec<_> = connections.iter().map(|held| flow_of(held.client()).clone()).collect();
        for (number, flow) in (1_u32..).zip(&held) {
            assert_eq!(flow["state"], "assured", "{flow}");
            let seed = number.wrapping_mul(0x9e37_79b9);
            stranger.attack(socket(flow, "client"), to, seed);
            // If the endpoint is on another node, its replies arrive here.
            if socket(flow, "source") != socket(flow, "client") {
                stranger.attack(socket(flow, "endpoint"), socket(flow, "source"), seed);
            }
        }
        let gone = reset.client();
        SockRef::from(reset.stream.get_ref()).set_linger(Some(Duration::ZERO)).unwrap();
        drop(reset);
        until(&format!("the end of the reset connection by {attach}, {family:?}"), PATIENCE, || {
            flows(agent).iter().all(|flow| socket(flow, "client") != gone)
        });
        let now = flows(agent);
        for (connection, before) in connections.iter_mut().zip(&held) {
            let after = now.iter().find(|flow| flow["client"] == before["client"]);
            let after = after.unwrap_or_else(|| panic!("{attach}: gone: {before}"));
            for field in ["state", "endpoint", "source"] {
                assert_eq!(after[field], before[field], "{attach} {field}");
            }
            let answer = connection.ask("still there").unwrap();
            assert_eq!(answer.pod, connection.pod, "{attach}");
        }
    }
}

/// One datagram from a node port to itself: each answer of an echoing endpoint would be its next
/// request.
fn a_datagram_makes_no_storm(
    cluster: &Cluster,
    agent: &Agent,
    stranger: &Stranger,
    attach: &str,
    hook: &str,
) {
    for family in Family::BOTH {
        let to = cluster.at(1, family, PORT);
        cluster.ask_until_all(Protocol::Udp, to, &["pod-1-1", "pod-2-1"]).unwrap();
        let dropped = || agent.packets(hook, "dropped-martian-source").unwrap();
        let end = (to.ip(), to.port());
        let before = dropped();
        stranger.send(&Packet::udp(end, end).payload(b"hello\n"));
        until(&format!("the drop by {attach}, {family:?}"), PATIENCE, || dropped() > before);
        assert_eq!(dropped(), before + 1, "{attach} {family:?}: no answer has come back");
        let made: Vec<_> = flows(agent);
        let looping: Vec<_> = made.iter().filter(|flow| socket(flow, "client") == to).collect();
        assert!(looping.is_empty(), "{attach}: {looping:?}");
    }
}

#[test]
fn strangers_end_nothing_and_make_no_storm_by_tc() {
    strangers_do_nothing("tc", "tc-ingress");
}

#[test]
fn strangers_end_nothing_and_make_no_storm_by_xdp() {
    strangers_do_nothing("xdp", "xdp");
}
