//! A process of the node is one Service's endpoint (a pod of the host's network), and its address and port are at the
//! same time another Service's frontend. A reply to a client of the latter leaves with the addresses and ports of a
//! packet from the process to that client, and the programs must not take it for one.

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::time::Duration;

use socket2::{Domain, Socket, Type};
use traffic_policy_testing::agent::Agent;
use traffic_policy_testing::cluster::{Cluster, TARGET};
use traffic_policy_testing::lab::{Family, Lab};
use traffic_policy_testing::object::{Backend, Policy, Port, Service};
use traffic_policy_testing::pace::scaled;

const NODE_PORT: u16 = 30_081;
const SOURCE: u16 = 4321;
const PATIENCE: Duration = Duration::from_secs(10);

/// The client's socket to an address, always from the same port.
fn client(cluster: &Cluster, to: SocketAddr) -> UdpSocket {
    cluster.lab.client().netns().run(|| {
        let socket = Socket::new(Domain::for_address(to), Type::DGRAM, None).unwrap();
        socket.set_reuse_address(true).unwrap();
        let any: IpAddr = if to.is_ipv4() { [0; 4].into() } else { [0; 16].into() };
        socket.bind(&SocketAddr::new(any, SOURCE).into()).unwrap();
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

/// By TC, as its programs at egress see the packets that those at ingress have redirected.
#[test]
fn its_address_is_a_frontend() {
    let cluster = Cluster::start(Lab::builder().pods(&[1, 1])).unwrap();
    let lab = &cluster.lab;
    let node = lab.node(1);
    let mut web = Service::new("web").port(Port::udp(TARGET, TARGET));
    let mut host = Service::new("host").policy(Policy::Local);
    host = host.port(Port::udp(80, TARGET).node_port(NODE_PORT));
    for family in Family::BOTH {
        web = web.external_ip(node.address(family));
    }
    let remote: Vec<_> = lab.pods().filter(|pod| pod.name == "pod-2-1").map(Backend::of).collect();
    cluster.manifests.apply(&web, &remote).unwrap();
    let process = Backend::at(&node.addresses).on_node("node-1");
    cluster.manifests.apply(&host, &[process]).unwrap();
    let _agents = Agent::start_all(lab, |agent| agent.attach("tc")).unwrap();
    for family in Family::BOTH {
        let own = SocketAddr::new(node.address(family), TARGET);
        let server = node.netns().run(|| UdpSocket::bind(own)).unwrap();
        server.set_read_timeout(Some(scaled(PATIENCE))).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut buffer = [0; 2048];
                while let Ok((_, from)) = server.recv_from(&mut buffer) {
                    server.send_to(b"host", from).unwrap();
                    if &buffer[..4] == b"done" {
                        return;
                    }
                }
            });
            let [one, other] = [own, cluster.at(1, family, NODE_PORT)].map(|to| client(&cluster, to));
            for turn in 0..3 {
                let what = format!("{family:?}, question {turn}");
                assert!(ask(&one, &format!("{what} to the frontend")).contains("pod-2-1"), "{what}");
                assert_eq!(ask(&other, &format!("{what} to the process")), "host", "{what}");
            }
            other.send(b"done").unwrap();
        });
    }
}
