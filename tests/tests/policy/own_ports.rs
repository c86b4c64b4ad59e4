//! Sockets of the node itself on SNAT ports, towards an endpoint of another node: they are
//! answered, and clients of the Service get other ports towards that endpoint. The agent, which
//! would take bound ports out of the range, is stopped.

use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::time::Duration;

use socket2::{Domain, Socket, Type};
use traffic_policy_testing::agent::Agent;
use traffic_policy_testing::cluster::{Cluster, Protocol, TARGET};
use traffic_policy_testing::lab::{Family, Lab};
use traffic_policy_testing::object::Policy;
use traffic_policy_testing::pace::scaled;

const PORT: u16 = 30_080;
/// The smallest SNAT port range that is possible.
const FIRST: u16 = 20_000;
const SNAT_PORT_COUNT: u16 = 4_200;
/// The number of ports that the node uses. A client's port is one of them by chance once in 21
/// times: that none of the 300 clients gets one happens once in a million runs.
const OWN: u16 = 200;
const CLIENTS: usize = 300;
const PATIENCE: Duration = Duration::from_secs(20);

/// A socket that sends requests and receives answers.
enum Asking {
    Tcp(BufReader<TcpStream>),
    Udp(UdpSocket),
}

impl Asking {
    /// Opens a socket in the calling thread's namespace, with this source port if it is not 0.
    fn start(protocol: Protocol, from: SocketAddr, to: SocketAddr) -> Self {
        let kind = if protocol == Protocol::Tcp { Type::STREAM } else { Type::DGRAM };
        let socket = Socket::new(Domain::for_address(to), kind, None).unwrap();
        socket.bind(&from.into()).unwrap_or_else(|error| panic!("binding {from}: {error}"));
        socket.set_read_timeout(Some(scaled(PATIENCE))).unwrap();
        let connected = match protocol {
            Protocol::Tcp => socket.connect_timeout(&to.into(), scaled(PATIENCE)),
            Protocol::Udp => socket.connect(&to.into()),
        };
        connected.unwrap_or_else(|error| panic!("{protocol:?} from {from} to {to}: {error}"));
        match protocol {
            Protocol::Tcp => Self::Tcp(BufReader::new(socket.into())),
            Protocol::Udp => Self::Udp(socket.into()),
        }
    }

    fn ask(&mut self, what: &str) {
        let answered = match self {
            Self::Tcp(stream) => {
                let mut line = String::new();
                stream.get_mut().write_all(b"there?\n").and_then(|()| stream.read_line(&mut line))
            }
            Self::Udp(socket) => {
                let mut buffer = [0; 1024];
                socket.send(b"there?").and_then(|_| socket.recv(&mut buffer))
            }
        };
        match answered {
            Ok(0) => panic!("{what}: closed by the other side"),
            Ok(_) => {}
            Err(error) => panic!("{what}: no answer: {error}"),
        }
    }
}

fn ports_are_kept_apart(attach: &str) {
    let cluster = Cluster::start(Lab::builder().pods(&[0, 1])).unwrap();
    let lab = &cluster.lab;
    let backends = cluster.backends();
    cluster.manifests.apply(&Cluster::node_port("web", Policy::Cluster, PORT), &backends).unwrap();
    let node = lab.node(1);
    let range = format!("{FIRST}-{}", FIRST + SNAT_PORT_COUNT - 1);
    let mut agent =
        Agent::builder(lab, node).attach(attach).flags(&["--snat-ports", &range]).start().unwrap();
    agent.wait_ready(PATIENCE).unwrap();
    agent.kill().unwrap();
    for family in Family::BOTH {
        for protocol in Protocol::BOTH {
            let what = format!("{attach} {family:?} {protocol:?}");
            let endpoint = SocketAddr::new(lab.node(2).pod(1).address(family), TARGET);
            let step = SNAT_PORT_COUNT / OWN;
            let ports = (0..OWN).map(|number| FIRST + number * step);
            let mut own: Vec<_> = node.netns().run(|| {
                ports
                    .clone()
                    .map(|port| {
                        let from = SocketAddr::new(node.address(family), port);
                        Asking::start(protocol, from, endpoint)
                    })
                    .collect()
            });
            own.iter_mut().for_each(|asking| asking.ask(&format!("{what}: the node's own, alone")));
            let mut clients = Vec::new();
            // A datagram holds its port for half a minute: the node's sockets keep sending.
            for _ in 0..10 {
                let node_port = cluster.at(1, family, PORT);
                let from = SocketAddr::new(lab.client().address(family), 0);
                clients.extend(lab.client().netns().run(|| {
                    (0..CLIENTS / 10).map(|_| Asking::start(protocol, from, node_port)).collect::<Vec<_>>()
                }));
                let new = clients.len() - CLIENTS / 10;
                clients[new..].iter_mut().for_each(|client| client.ask(&format!("{what}: a client")));
                own.iter_mut()
                    .for_each(|asking| asking.ask(&format!("{what}: the node's own, among clients")));
            }
            clients.iter_mut().for_each(|client| client.ask(&format!("{what}: a client, again")));

            let flows = agent.json(&["flows"]).unwrap();
            let sources: Vec<SocketAddr> = flows
                .as_array()
                .unwrap()
                .iter()
                .filter(|flow| {
                    flow["protocol"].as_str().unwrap().eq_ignore_ascii_case(&format!("{protocol:?}"))
                })
                .map(|flow| flow["source"].as_str().unwrap().parse::<SocketAddr>().unwrap())
                .filter(|source| source.is_ipv4() == (family == Family::V4))
                .collect();
            assert!(sources.len() >= CLIENTS, "{what}: {} flows", sources.len());
            let shared: Vec<_> =
                sources.iter().filter(|source| ports.clone().any(|port| port == source.port())).collect();
            assert!(shared.is_empty(), "{what}: the node's own ports, too: {shared:?}");
        }
    }
}

#[test]
fn by_tc() {
    ports_are_kept_apart("tc");
}

#[test]
fn by_xdp() {
    ports_are_kept_apart("xdp");
}
