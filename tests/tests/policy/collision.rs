//! One client with one source port talks to two addresses of one endpoint at once: towards the pod
//! both would be the same connection, so one of them gets another port.

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use socket2::{Domain, Socket, Type};
use traffic_policy_testing::agent::Agent;
use traffic_policy_testing::cluster::{Cluster, Protocol, TARGET};
use traffic_policy_testing::lab::{Family, Lab};
use traffic_policy_testing::object::{Policy, Port, Service};
use traffic_policy_testing::pace::scaled;
use traffic_policy_testing::traffic::Answer;

const SOURCE: u16 = 4321;

/// A conversation from a fixed source port that stays open.
struct Open(Socket);

impl Open {
    fn to(cluster: &Cluster, protocol: Protocol, to: SocketAddr) -> Self {
        let kind = if protocol == Protocol::Tcp { Type::STREAM } else { Type::DGRAM };
        cluster.lab.client().netns().run(|| {
            let socket = Socket::new(Domain::for_address(to), kind, None).unwrap();
            socket.set_reuse_address(true).unwrap();
            let any: IpAddr = if to.is_ipv4() { [0; 4].into() } else { [0; 16].into() };
            socket.bind(&SocketAddr::new(any, SOURCE).into()).unwrap();
            socket.set_read_timeout(Some(scaled(Duration::from_secs(3)))).unwrap();
            socket.connect_timeout(&to.into(), scaled(Duration::from_secs(3))).unwrap();
            Self(socket)
        })
    }

    fn ask(&mut self, word: &str) -> Answer {
        self.0.write_all(format!("{word}\n").as_bytes()).unwrap();
        let mut buffer = [0; 2048];
        let length = self.0.read(&mut buffer).unwrap();
        let answer = Answer::parse(std::str::from_utf8(&buffer[..length]).unwrap().trim_end()).unwrap();
        assert_eq!(answer.said, word, "the answer to another question");
        answer
    }
}

fn two_at_once(attach: &str) {
    let cluster = Cluster::start(Lab::builder().pods(&[1])).unwrap();
    let lab = &cluster.lab;
    let vips: [IpAddr; 2] = ["203.0.113.1".parse().unwrap(), "2001:db8:f::1".parse().unwrap()];
    // Three addresses lead to one pod: two node ports of two Services, and a load balancer's
    // address.
    for (name, port) in [("one", 30080), ("two", 30081)] {
        let service = Cluster::node_port(name, Policy::Local, port);
        cluster.manifests.apply(&service, &cluster.backends()).unwrap();
    }
    let three = Service::new("three").policy(Policy::Local).vip(vips[0]).vip(vips[1]);
    let three = three.port(Port::tcp(80, TARGET)).port(Port::udp(80, TARGET));
    cluster.manifests.apply(&three, &cluster.backends()).unwrap();
    let _agents = Agent::start_first(1, lab, |agent| agent.attach(attach)).unwrap();
    vips.iter().for_each(|vip| lab.route_vip(*vip, lab.node(1)).unwrap());
    for (family, vip) in Family::BOTH.into_iter().zip(vips) {
        for protocol in Protocol::BOTH {
            let what = format!("{attach} {family:?} {protocol:?}");
            let ways = [cluster.at(1, family, 30080), cluster.at(1, family, 30081), (vip, 80).into()];
            let mut open = ways.map(|way| Open::to(&cluster, protocol, way));
            let mut ports = Vec::new();
            for turn in 0..3 {
                for (number, one) in open.iter_mut().enumerate() {
                    let answer = one.ask(&format!("{number} {turn}"));
                    assert_eq!(answer.client.ip(), lab.client().address(family), "{what}");
                    if turn == 0 {
                        ports.push(answer.client.port());
                    } else {
                        assert_eq!(answer.client.port(), ports[number], "{what}: changed its port");
                    }
                }
            }
            assert_eq!(ports[0], SOURCE, "{what}: the first keeps its port");
            let distinct: std::collections::BTreeSet<_> = ports.iter().collect();
            assert_eq!(distinct.len(), 3, "{what}: {ports:?}");
        }
    }
}

#[test]
fn by_tc() {
    two_at_once("tc");
}

#[test]
fn by_xdp() {
    two_at_once("xdp");
}
