//! The client's address, as pods see it, in every combination of forwarding, IP family, protocol,
//! hook of the node in front, dispatch and layout of the network plugin; SNAT is the control of
//! each.
//!
//! One cluster for each layout has all of its combinations: its nodes differ in hook and in what
//! they prefer to open, and each is in front once.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::process::Command;
use std::time::Duration;

use traffic_policy_testing::agent::{self, Agent};
use traffic_policy_testing::capture::{Capture, Frame};
use traffic_policy_testing::cluster::{Cluster, Protocol};
use traffic_policy_testing::lab::{Cni, Family, Lab, Node};
use traffic_policy_testing::object::{Policy, lease};
use traffic_policy_testing::skipped;
use traffic_policy_testing::traffic::Outcome;

use super::udp::UDP;
use super::{IP6IP6, IPIP, ip_header};

/// The protocol number of TCP.
const TCP: u8 = 6;
const DIRECT: (&str, u16) = ("direct", 30090);
const SNAT: (&str, u16) = ("snat", 30091);
const TUNNEL: (&str, u16) = ("tunnel", 30092);
/// The hook of each node, and the dispatch that it prefers to open. The other two nodes differ in
/// dispatch or have the same hook as the third, so that each hook sends both kinds.
const NODES: [(&str, &str); 3] = [("tc", "ipip,udp"), ("xdp", "udp,ipip"), ("xdp", "ipip,udp")];
const PODS: [&str; 3] = ["pod-1-1", "pod-2-1", "pod-3-1"];
const ETHERNET: usize = 14;
/// The port of outer packets of UDP.
const OUTER_PORT: u16 = 6080;

/// Forwarding, hook, dispatch, family and protocol of what a pod of another node has seen.
type Cell = (&'static str, &'static str, &'static str, &'static str, &'static str);

/// A packet at a device.
pub struct Passed {
    /// Whether the device has sent it, rather than received it.
    pub outgoing: bool,
    /// The protocol, source and destination.
    pub header: (u8, IpAddr, IpAddr),
    /// The ports of the packet, or of the one inside.
    pub ports: [u16; 2],
}

impl Passed {
    pub fn read(outgoing: bool, ip: &[u8]) -> Option<Self> {
        let header = ip_header(ip)?;
        let length = if header.1.is_ipv4() { 20 } else { 40 };
        let rest = ip.get(length..)?;
        let port = |at: usize| Some(u16::from_be_bytes(*rest.get(at..)?.first_chunk()?));
        let inside = match header.0 {
            IPIP | IP6IP6 => Some(rest),
            UDP if port(2)? == OUTER_PORT => rest.get(8..),
            _ => None,
        };
        match inside {
            Some(inside) => Some(Self { ports: Self::read(outgoing, inside)?.ports, outgoing, header }),
            None => Some(Self { ports: [port(0)?, port(2)?], outgoing, header }),
        }
    }
}

struct Scene {
    cluster: Cluster,
    /// `None`: a bridge for all pods and plain routes between the nodes, as without a plugin.
    cni: Option<Cni>,
    name: &'static str,
}

impl Scene {
    /// Returns `None`, and says why, where this machine cannot make the layout.
    fn start(cni: Option<Cni>) -> Option<Self> {
        let name = cni.map_or("veths", Cni::name);
        if let Some(missing) = cni.and_then(|cni| cni.missing().unwrap()) {
            skipped(name, format!("there is {missing}"));
            return None;
        }
        let lab = Lab::builder().pods(&[1, 1, 1]).wire_offloads(false);
        let cluster = Cluster::start(match cni {
            Some(cni) => lab.cni(cni),
            None => lab,
        });
        let mut scene = Self { cluster: cluster.unwrap(), cni, name };
        scene.launch();
        Some(scene)
    }

    fn launch(&mut self) {
        let lab = &self.cluster.lab;
        if self.cni == Some(Cni::Kindnet) {
            // Without it, what XDP sends back is lost (`cni::veth_peer`).
            let mut command = Command::new(agent::program().unwrap());
            command.args(["veth-peer", "--attach"]).args(lab.nodes().iter().map(|node| &node.name));
            let output = lab.router().output(command).unwrap();
            assert!(output.status.success(), "{output:?}");
        }
        let leases = lab.nodes().iter().zip(NODES);
        let leases: Vec<_> =
            leases.map(|(node, (_, prefers))| lease::tunnels_in(lab, node, prefers)).collect();
        self.cluster.manifests.write("leases", &leases).unwrap();
        for (name, port) in [DIRECT, SNAT, TUNNEL] {
            let service = Cluster::node_port(name, Policy::Cluster, port);
            let service = service.annotation("traffic-policy.io/forwarding", name);
            self.cluster.manifests.apply(&service, &self.cluster.backends()).unwrap();
        }
        // No driver accepts XDP frames for a VXLAN device.
        let is_vxlan = matches!(self.cni, Some(Cni::FlannelVxlan | Cni::CalicoVxlan));
        let agents = lab.nodes().iter().zip(NODES).map(|(node, (hook, _))| {
            let attach = if hook == "xdp" && is_vxlan { "xdp-generic" } else { hook };
            Agent::builder(lab, node).attach(attach).devices(&[]).start().unwrap()
        });
        let agents: Vec<_> = agents.collect();
        for agent in &agents {
            agent.wait_ready(Duration::from_secs(20)).unwrap();
        }
        self.cluster.agents = agents;
    }

    /// The devices by which nodes reach each other and the client, and the length of their link
    /// headers.
    fn devices(&self, family: Family) -> Vec<(&'static str, usize)> {
        let to_pods = match (self.cni, family) {
            (Some(Cni::FlannelVxlan), Family::V4) => ("flannel.1", ETHERNET),
            (Some(Cni::FlannelVxlan), Family::V6) => ("flannel-v6.1", ETHERNET),
            (Some(Cni::CalicoVxlan), Family::V4) => ("vxlan.calico", ETHERNET),
            (Some(Cni::CalicoVxlan), Family::V6) => ("vxlan-v6.calico", ETHERNET),
            (Some(Cni::CalicoIpip), Family::V4) => ("tunl0", 0),
            (Some(Cni::Wireguard), Family::V4) => ("flannel-wg", 0),
            (Some(Cni::Wireguard), Family::V6) => ("flannel-wg-v6", 0),
            (Some(Cni::AwsSecondaryEni), _) => ("eth1", ETHERNET),
            _ => return vec![("eth0", ETHERNET)],
        };
        vec![("eth0", ETHERNET), to_pods]
    }

    /// Asks a node port on a node until every pod has answered. Returns the address that each pod
    /// saw, by node.
    fn seen(&self, protocol: Protocol, to: (usize, Family, u16)) -> BTreeSet<(usize, IpAddr)> {
        let (front, family, port) = to;
        let to = self.cluster.at(front, family, port);
        let answers = self.cluster.ask_until_all(protocol, to, &PODS).unwrap();
        let nodes = self.cluster.lab.nodes();
        let node = |name: &str| 1 + nodes.iter().position(|node| node.name == name).unwrap();
        answers.iter().map(|answer| (node(&answer.node), answer.client.ip())).collect()
    }

    /// The packets at a node's devices, once the capture of each is over.
    fn captures(&self, node: &Node, family: Family) -> impl FnOnce() -> Vec<Passed> + use<> {
        let start = |(device, header)| (Capture::start(node.netns(), device).unwrap(), header);
        let captures: Vec<_> = self.devices(family).into_iter().map(start).collect();
        move || {
            let read = |(capture, header): (Capture, usize)| {
                let frames = capture.finish_valid().unwrap();
                let read = move |frame: &Frame| Passed::read(frame.outgoing, frame.bytes.get(header..)?);
                frames.iter().filter_map(read).collect::<Vec<_>>()
            };
            captures.into_iter().flat_map(read).collect()
        }
    }

    /// Returns the combinations in which a pod saw the client.
    fn cells(&self, forwardings: &[(&'static str, u16)]) -> BTreeSet<Cell> {
        let fronts = 1..=NODES.len();
        fronts
            .flat_map(|front| Family::BOTH.map(|family| (front, family)))
            .flat_map(|(front, family)| Protocol::BOTH.map(|protocol| (front, family, protocol)))
            .flat_map(|(front, family, protocol)| {
                forwardings.iter().map(move |forwarding| (front, family, protocol, *forwarding))
            })
            .flat_map(|(front, family, protocol, forwarding)| {
                self.cells_of(front, family, protocol, forwarding)
            })
            .collect()
    }

    fn cells_of(
        &self,
        front: usize,
        family: Family,
        protocol: Protocol,
        (forwarding, port): (&'static str, u16),
    ) -> Vec<Cell> {
        let lab = &self.cluster.lab;
        let (client, node) = (lab.client().address(family), lab.node(front));
        let what = format!("{} {forwarding}, {} in front, {family:?} {protocol:?}", self.name, node.name);
        let captures = [1, 2, 3].map(|number| self.captures(lab.node(number), family));
        let seen = self.seen(protocol, (front, family, port));
        let packets = captures.map(|finish| finish());
        let source = lab.source_towards_pods(node, family);
        if forwarding == SNAT.0 {
            // The control: the node's address, but for its own pod.
            let nodes = [1, 2, 3].map(|home| (home, if home == front { client } else { source }));
            assert_eq!(seen, nodes.into(), "{what}: what pods see");
            return Vec::new();
        }
        assert_eq!(seen, [1, 2, 3].map(|number| (number, client)).into(), "{what}: what pods see");
        let ipip = if family == Family::V4 { IPIP } else { IP6IP6 };
        let mut cells = Vec::new();
        for (home, packets) in (1..).zip(packets).filter(|(home, _)| *home != front) {
            let dispatch = NODES[home - 1].1.split(',').next().unwrap();
            let within = if dispatch == "udp" { UDP } else { ipip };
            let home = lab.node(home);
            let protocols = |outgoing: bool, from: IpAddr, to: IpAddr| -> BTreeSet<_> {
                let is_one = |packet: &&Passed| {
                    packet.ports[usize::from(!outgoing)] == port
                        && (packet.outgoing, packet.header.1, packet.header.2) == (outgoing, from, to)
                };
                packets.iter().filter(is_one).map(|packet| packet.header.0).collect()
            };
            let came = protocols(false, source, home.pod(1).address(family));
            assert_eq!(came, BTreeSet::from([within]), "{what}: what reaches {}", home.name);
            let sent = protocols(true, lab.source_towards_pods(home, family), source);
            let answered = protocols(true, node.address(family), client);
            let number = if protocol == Protocol::Tcp { TCP } else { UDP };
            // Pods of connections before this one may still send segments again.
            let answered: BTreeSet<_> = answered.into_iter().filter(|sent| *sent == number).collect();
            let (own, foreign) = if forwarding == TUNNEL.0 {
                (BTreeSet::from([within]), BTreeSet::new())
            } else {
                (BTreeSet::new(), BTreeSet::from([number]))
            };
            assert_eq!((sent, answered), (own, foreign), "{what}: what {} sends", home.name);
            let family = if family == Family::V4 { "IPv4" } else { "IPv6" };
            let protocol = if protocol == Protocol::Tcp { "TCP" } else { "UDP" };
            cells.push((forwarding, NODES[front - 1].0, dispatch, family, protocol));
        }
        cells
    }

    /// Checks which hook forwarded the requests: XDP, or TC where pods of other nodes are behind a
    /// tunnel device. XDP leaves packets to TC whose next hop is not resolved yet.
    fn the_intended_hooks_work(&self) {
        for (agent, (hook, _)) in self.cluster.agents.iter().zip(NODES) {
            let counts = |outcome| ["xdp", "tc-ingress"].map(|hook| agent.packets(hook, outcome).unwrap());
            let [xdp, tc] = counts("forwarded-direct");
            let is_so = match self.cni {
                // A tunnel for IPv4 alone.
                Some(Cni::CalicoIpip) if hook == "xdp" => xdp > 0 && tc > 0,
                Some(cni) if cni.has_tunnels() => xdp == 0 && tc > 0,
                _ if hook == "xdp" => xdp > 4 * tc,
                _ => xdp == 0 && tc > 0,
            };
            assert!(is_so, "{} {hook}: XDP {xdp}, TC {tc}", self.name);
            let opened = counts("replied-opened");
            println!("{} {hook}: replies opened by XDP and TC: {opened:?}", self.name);
            assert!(opened.iter().sum::<u64>() > 0, "{} {hook}", self.name);
        }
    }
}

fn pods_see_the_client_in_every_combination(cni: Option<Cni>) {
    let Some(scene) = Scene::start(cni) else { return };
    let found = if cni == Some(Cni::AwsSecondaryEni) {
        through_a_cloud(&scene)
    } else {
        scene.cells(&[DIRECT, TUNNEL, SNAT])
    };
    for (forwarding, hook, dispatch, family, protocol) in &found {
        println!("{} {forwarding} {hook} {dispatch} {family} {protocol}: the client", scene.name);
    }
    assert_eq!(found.len(), 32, "{found:?}");
    scene.the_intended_hooks_work();
}

/// A cloud that checks sources and destinations lets through what `tunnel` sends, and what `direct`
/// sends once the check is off.
fn through_a_cloud(scene: &Scene) -> BTreeSet<Cell> {
    let mut found = scene.cells(&[TUNNEL, SNAT]);
    let cluster = &scene.cluster;
    let to = cluster.at(1, Family::V4, DIRECT.1);
    let is_lost = (0..30).any(|_| {
        let probe = Protocol::Tcp.probe(to).limit(Duration::from_millis(500));
        probe.from(cluster.lab.client().netns()).unwrap() == Outcome::Silent
    });
    assert!(is_lost, "the control: a foreign source does not pass");
    let mut command = Command::new("iptables");
    command.args(["--flush", "FORWARD"]);
    let output = cluster.lab.router().output(command).unwrap();
    assert!(output.status.success(), "{output:?}");
    found.extend(scene.cells(&[DIRECT]));
    found
}

#[test]
fn a_veth_for_each_pod() {
    pods_see_the_client_in_every_combination(None);
}

#[test]
fn a_bridge_for_all_pods() {
    pods_see_the_client_in_every_combination(Some(Cni::Bridge));
}

#[test]
fn an_overlay_between_nodes() {
    pods_see_the_client_in_every_combination(Some(Cni::FlannelVxlan));
}

#[test]
fn kindnet() {
    pods_see_the_client_in_every_combination(Some(Cni::Kindnet));
}

#[test]
fn flannel_host_gw() {
    pods_see_the_client_in_every_combination(Some(Cni::FlannelHostGw));
}

#[test]
fn calico_vxlan() {
    pods_see_the_client_in_every_combination(Some(Cni::CalicoVxlan));
}

#[test]
fn calico_ipip() {
    pods_see_the_client_in_every_combination(Some(Cni::CalicoIpip));
}

#[test]
fn wireguard() {
    pods_see_the_client_in_every_combination(Some(Cni::Wireguard));
}

#[test]
fn aws_secondary_eni() {
    pods_see_the_client_in_every_combination(Some(Cni::AwsSecondaryEni));
}
