//! A process of the node is one Service's endpoint (a pod of the host's network), while its address
//! and port are another Service's frontend. A client sends to both from one port: a request to the
//! latter arrives with the addresses and ports of a translated request to the process, and a reply
//! leaves with those of a packet from the process to that client. The programs must not confuse
//! them.

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use socket2::{Domain, Socket, Type};
use traffic_policy_testing::agent::Agent;
use traffic_policy_testing::cluster::{Cluster, TARGET};
use traffic_policy_testing::lab::{Family, Lab, Node};
use traffic_policy_testing::object::{Backend, Policy, Port, Service};
use traffic_policy_testing::pace::scaled;

const NODE_PORT: u16 = 30_081;
const PATIENCE: Duration = Duration::from_secs(10);
/// The number of the client's requests to each of both.
const TURNS: usize = 3;

/// The order in which both get requests from a port.
#[derive(Clone, Copy, Debug)]
enum First {
    Frontend,
    Process,
}

/// The client's socket for an address, with this source port.
fn client(cluster: &Cluster, from: u16, to: SocketAddr) -> UdpSocket {
    cluster.lab.client().netns().run(|| {
        let socket = Socket::new(Domain::for_address(to), Type::DGRAM, None).unwrap();
        socket.set_reuse_address(true).unwrap();
        let any: IpAddr = if to.is_ipv4() { [0; 4].into() } else { [0; 16].into() };
        socket.bind(&SocketAddr::new(any, from).into()).unwrap();
        socket.set_read_timeout(Some(scaled(PATIENCE))).unwrap();
        socket.connect(&to.into()).unwrap();
        socket.into()
    })
}

#[track_caller]
fn ask(socket: &UdpSocket, what: &str) -> String {
    let mut buffer = [0; 2048];
    socket.send(b"there?").unwrap();
    let length = socket.recv(&mut buffer).unwrap_or_else(|error| panic!("{what}: {error}"));
    String::from_utf8_lossy(&buffer[..length]).into_owned()
}

/// A process of the node that answers every datagram, until it receives one that ends it.
struct Process(JoinHandle<()>);

impl Process {
    fn start(node: &Node, at: SocketAddr) -> Self {
        let server = node.netns().run(|| UdpSocket::bind(at)).unwrap();
        Self(thread::spawn(move || {
            let mut buffer = [0; 2048];
            while let Ok((length, from)) = server.recv_from(&mut buffer) {
                if &buffer[..length] == b"done" {
                    return;
                }
                server.send_to(b"host", from).unwrap();
            }
        }))
    }

    fn end(self, node: &Node, at: SocketAddr) {
        let any: IpAddr = if at.is_ipv4() { [0; 4].into() } else { [0; 16].into() };
        let socket = node.netns().run(|| UdpSocket::bind((any, 0))).unwrap();
        // The datagram comes from the node itself, so no program at a device sees it.
        socket.send_to(b"done", at).unwrap();
        self.0.join().unwrap();
    }
}

/// Makes the Service at the address and port of the process: its endpoint is a pod of another node.
fn serve_frontend(cluster: &Cluster) {
    let node = cluster.lab.node(1);
    let mut web = Service::new("web").port(Port::udp(TARGET, TARGET));
    for family in Family::BOTH {
        web = web.external_ip(node.address(family));
    }
    let remote: Vec<_> = cluster.lab.pods().filter(|pod| pod.name == "pod-2-1").map(Backend::of).collect();
    cluster.manifests.apply(&web, &remote).unwrap();
}

/// Makes the Service whose endpoint is the process.
fn serve_process(cluster: &Cluster) {
    let mut host = Service::new("host").policy(Policy::Local);
    host = host.port(Port::udp(80, TARGET).node_port(NODE_PORT));
    let process = Backend::at(&cluster.lab.node(1).addresses).on_node("node-1");
    cluster.manifests.apply(&host, &[process]).unwrap();
}

fn its_address_is_a_frontend(attach: &str) {
    let cluster = Cluster::start(Lab::builder().pods(&[1, 1])).unwrap();
    let lab = &cluster.lab;
    let node = lab.node(1);
    serve_frontend(&cluster);
    serve_process(&cluster);
    let _agents = Agent::start_first(1, lab, |agent| agent.attach(attach)).unwrap();
    for family in Family::BOTH {
        let own = SocketAddr::new(node.address(family), TARGET);
        let process = Process::start(node, own);
        for (first, from) in [(First::Frontend, 4321), (First::Process, 4322)] {
            let [frontend, host] =
                [own, cluster.at(1, family, NODE_PORT)].map(|to| client(&cluster, from, to));
            for turn in 0..TURNS {
                let what = format!("{attach} {family:?}, {first:?} first, question {turn}");
                let to_frontend = || {
                    let answer = ask(&frontend, &format!("{what} to the frontend"));
                    assert!(answer.contains("pod-2-1"), "{what} to the frontend: {answer}");
                };
                let to_process =
                    || assert_eq!(ask(&host, &format!("{what} to the process")), "host", "{what}");
                match first {
                    First::Frontend => {
                        to_frontend();
                        to_process();
                    }
                    First::Process => {
                        to_process();
                        to_frontend();
                    }
                }
            }
        }
        process.end(node, own);
    }
}

#[test]
fn its_address_is_a_frontend_by_tc() {
    its_address_is_a_frontend("tc");
}

#[test]
fn its_address_is_a_frontend_by_xdp() {
    its_address_is_a_frontend("xdp");
}
