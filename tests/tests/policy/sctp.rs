//! SCTP from outside and from pods, through agents, devices and stacks: both policies, both
//! families, endpoints on this node and on another.
//!
//! Client and endpoints use raw sockets, so that no SCTP support in the kernel is needed. The
//! receiver computes the checksum of each packet in full. A packet with a wrong checksum is not
//! treated as lost: the test reports it.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::AsRawFd as _;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::socket::{SockaddrStorage, recvfrom};
use serde_json::json;
use socket2::{Domain, Protocol, SockAddr, Socket, Type};
use traffic_policy_testing::agent::Agent;
use traffic_policy_testing::checksum::crc32c;
use traffic_policy_testing::cluster::{Cluster, TARGET};
use traffic_policy_testing::lab::{Cni, Family, Lab, LabBuilder, Pod};
use traffic_policy_testing::netns::Namespace;
use traffic_policy_testing::object::{Backend, Policy, Port, Service, lease};
use traffic_policy_testing::pace::{scaled, until};
use traffic_policy_testing::packet::chunk::{
    COOKIE_ACK, COOKIE_ECHO, DATA, INIT, INIT_ACK, SHUTDOWN, SHUTDOWN_ACK, SHUTDOWN_COMPLETE,
};
use traffic_policy_testing::skipped;

const CLUSTER: u16 = 30_090;
const LOCAL: u16 = 30_091;

/// Received packets with a wrong checksum, or truncated.
type Damaged = Mutex<Vec<String>>;

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
fn serve(pod: &Pod, family: Family, number: u32, stop: &AtomicBool, damaged: &Damaged) {
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
struct Association<'a> {
    socket: Socket,
    damaged: &'a Damaged,
    family: Family,
    to: SocketAddr,
    port: u16,
    own_tag: u32,
    tag: u32,
}

impl<'a> Association<'a> {
    fn new(client: &Namespace, family: Family, to: SocketAddr, port: u16, damaged: &'a Damaged) -> Self {
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

    fn init(&self) -> Message {
        let rest = [0, 1, 0, 0, 0, 10, 0, 10, 1, 2, 3, 4];
        let message = self.message(INIT, &[&self.own_tag.to_be_bytes()[..], &rest].concat());
        Message { tag: 0, ..message }
    }

    /// Runs an association from INIT to SHUTDOWN COMPLETE, and returns the endpoint's answers to
    /// data of each length.
    fn whole(mut self, lengths: &[usize]) -> Vec<String> {
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

    fn open(&mut self) {
        let answer = self.answered(&self.init(), INIT_ACK);
        self.tag = u32::from_be_bytes(*answer.first_chunk().unwrap());
        self.answered(&self.message(COOKIE_ECHO, &[7; 200]), COOKIE_ACK);
    }

    /// Sends data of a length, and returns what the endpoint says.
    fn say(&self, length: usize) -> String {
        String::from_utf8(self.answered(&self.message(DATA, &vec![9; length]), DATA)).unwrap()
    }

    fn shut_down(self) {
        self.answered(&self.message(SHUTDOWN, &[0; 4]), SHUTDOWN_ACK);
        send(&self.socket, self.to.ip(), &self.message(SHUTDOWN_COMPLETE, &[]));
    }
}

fn service(name: &str, policy: Policy, node_port: u16) -> Service {
    Service::new(name).policy(policy).port(Port::sctp(80, TARGET).node_port(node_port))
}

/// The way of packets to an endpoint on another node.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    Snat,
    /// Directly, in this dispatch.
    Direct(&'static str),
    /// SNAT, with `--forwarding tunnel`, which is for TCP and UDP.
    Tunnel,
    /// The other node has an agent that opens no SCTP.
    Earlier,
}

fn associations(attach: &str, way: Way) {
    associations_in(Lab::builder(), attach, way);
}

fn associations_in(lab: LabBuilder, attach: &str, way: Way) {
    let cluster = Cluster::start(lab.pods(&[1, 1])).unwrap();
    let lab = &cluster.lab;
    let lease = |node| match way {
        Way::Earlier => lease::opens(node, &Family::BOTH),
        _ => lease::tunnels_in(lab, node, "ipip,udp"),
    };
    if way != Way::Snat {
        let leases: Vec<_> = lab.nodes().iter().map(lease).collect();
        cluster.manifests.write("leases", &leases).unwrap();
    }
    let elsewhere: Vec<_> = lab.pods().filter(|pod| pod.name == "pod-2-1").map(Backend::of).collect();
    // Ended flows are counted at the end of the test, which may come later than the default of 10
    // s.
    let mut flags = vec!["--idle-reset", "1h"];
    match way {
        Way::Snat => {}
        Way::Direct(dispatch) => flags.extend(["--forwarding", "direct", "--dispatch", dispatch]),
        Way::Tunnel => flags.extend(["--forwarding", "tunnel"]),
        Way::Earlier => flags.extend(["--forwarding", "direct"]),
    }
    let agents = Agent::start_all(lab, |agent| agent.attach(attach).devices(&[]).flags(&flags)).unwrap();
    // They come when the agents run, which have loaded no program of SCTP by then.
    cluster.manifests.apply(&service("cluster", Policy::Cluster, CLUSTER), &cluster.backends()).unwrap();
    cluster.manifests.apply(&service("local", Policy::Local, LOCAL), &elsewhere).unwrap();
    for agent in &agents {
        agent.wait_said(&["SCTP is served"], Duration::from_secs(20)).unwrap();
    }
    while_served(lab, attach, |damaged| ask_all(&cluster, &agents, attach, way, damaged));
}

/// Asks while each pod has an endpoint, which must get no damaged packet.
fn while_served(lab: &Lab, what: &str, ask: impl FnOnce(&Damaged)) {
    let (stop, damaged) = (AtomicBool::new(false), Damaged::default());
    thread::scope(|scope| {
        for (number, pod) in (1..).zip(lab.pods()) {
            for family in Family::BOTH {
                let (stop, damaged) = (&stop, &damaged);
                scope.spawn(move || pod.netns().run(|| serve(pod, family, number, stop, damaged)));
            }
        }
        let asked = std::panic::AssertUnwindSafe(|| ask(&damaged));
        let ended = std::panic::catch_unwind(asked);
        stop.store(true, Relaxed);
        // This comes first: the receiver of a damaged packet does not answer, and the other side
        // waits in vain.
        let damaged = damaged.lock().unwrap();
        assert!(damaged.is_empty(), "{what}, damaged packets: {damaged:#?}");
        ended.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    });
}

fn ask_all(cluster: &Cluster, agents: &[Agent], attach: &str, way: Way, damaged: &Damaged) {
    let lab = &cluster.lab;
    let client = lab.client().netns();
    let mut ports = 41_000..;
    let mut associate = |family, to| Association::new(client, family, to, ports.next().unwrap(), damaged);
    for family in Family::BOTH {
        // Enough for both endpoints to be chosen: in four of a million runs one of them is not.
        let mut seen: HashMap<String, String> = HashMap::new();
        for _ in 0..20 {
            let association = associate(family, cluster.at(1, family, CLUSTER));
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
        let there = match way {
            Way::Direct(_) => here.clone(),
            _ => lab.source_towards_pods(lab.node(1), family).to_string(),
        };
        let expected = [("pod-1-1".to_owned(), here.clone()), ("pod-2-1".to_owned(), there)];
        assert_eq!(seen, HashMap::from(expected), "{attach} {family:?}");

        let association = associate(family, cluster.at(2, family, LOCAL));
        assert_eq!(association.whole(&[100]), [format!("pod-2-1 {here} 100")], "{attach} {family:?}");
        let nobody = associate(family, cluster.at(1, family, LOCAL));
        assert_eq!(nobody.ask(&nobody.init(), INIT_ACK, Duration::from_millis(500)), None);
    }
    let hook = if attach == "tc" { "tc-ingress" } else { "xdp" };
    let outcome = if let Way::Direct(_) = way { "forwarded-direct" } else { "forwarded" };
    assert!(agents[0].packets(hook, outcome).unwrap() > 0);
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

/// Packets of a pod to ClusterIPs are translated at its device (`--pod-services on`): an endpoint
/// on its own node, and one elsewhere, see the pod. `late`: the Services come after the agents.
fn from_a_pod(flags: &[&str], late: bool) {
    let cluster = Cluster::start(Lab::builder().pods(&[2, 1])).unwrap();
    let lab = &cluster.lab;
    let ip = |number: u8, family| match family {
        Family::V4 => IpAddr::from([10, 96, 0, number]),
        Family::V6 => IpAddr::from([0xfd00, 0x10, 0x96, 0, 0, 0, 0, number.into()]),
    };
    let endpoints = [lab.node(1).pod(2), lab.node(2).pod(1)];
    let apply = || {
        for (number, pod) in (1..).zip(endpoints) {
            let service = Service::new(&format!("service-{number}")).only_cluster_ip();
            let service = Family::BOTH.iter().fold(service, |it, family| it.cluster_ip(ip(number, *family)));
            cluster.manifests.apply(&service.port(Port::sctp(80, TARGET)), &[Backend::of(pod)]).unwrap();
        }
    };
    if !late {
        apply();
    }
    let agents = Agent::start_first(1, lab, |agent| agent.flags(flags)).unwrap();
    if late {
        apply();
        for agent in &agents {
            agent.wait_said(&["SCTP is served"], Duration::from_secs(20)).unwrap();
        }
    }
    let client = lab.node(1).pod(1);
    while_served(lab, "from a pod", |damaged| {
        for family in Family::BOTH {
            for (number, pod) in (1..).zip(endpoints) {
                let to = SocketAddr::new(ip(number, family), 80);
                let port = 42_000 + u16::from(number);
                let association = Association::new(client.netns(), family, to, port, damaged);
                if flags.is_empty() {
                    let answer = association.ask(&association.init(), INIT_ACK, Duration::from_millis(500));
                    assert_eq!(answer, None, "{to}");
                    continue;
                }
                let seen = client.address(family);
                let expected = [1, 1200].map(|length| format!("{} {seen} {length}", pod.name));
                assert_eq!(association.whole(&[1, 1200]), expected, "{to}");
            }
        }
    });
}

#[test]
fn from_a_pod_by_its_device() {
    from_a_pod(&["--pod-services", "on", "--local-delivery", "direct"], false);
}

#[test]
fn from_a_pod_when_services_come_later() {
    from_a_pod(&["--pod-services", "on"], true);
}

#[test]
fn from_a_pod_without_the_flag() {
    from_a_pod(&[], false);
}

#[test]
fn by_tc() {
    associations("tc", Way::Snat);
}

#[test]
fn by_xdp() {
    associations("xdp", Way::Snat);
}

#[test]
fn directly_within_ip_by_tc() {
    associations("tc", Way::Direct("ipip"));
}

#[test]
fn directly_within_udp_by_tc() {
    associations("tc", Way::Direct("udp"));
}

#[test]
fn directly_within_ip_by_xdp() {
    associations("xdp", Way::Direct("ipip"));
}

#[test]
fn directly_within_udp_by_xdp() {
    associations("xdp", Way::Direct("udp"));
}

#[test]
fn by_snat_to_a_node_that_opens_no_sctp() {
    associations("tc", Way::Earlier);
}

fn in_a_layout(cni: Cni, attach: &str, way: Way) {
    if let Some(missing) = cni.missing().unwrap() {
        return skipped(format!("SCTP in {}", cni.name()), format!("there is {missing}"));
    }
    associations_in(Lab::builder().cni(cni), attach, way);
}

/// The rules on the endpoint's node drop packets that conntrack calls INVALID.
#[test]
fn directly_through_an_overlay() {
    in_a_layout(Cni::CalicoVxlan, "tc", Way::Direct("udp"));
}

#[test]
fn directly_between_bridges_by_xdp() {
    in_a_layout(Cni::FlannelHostGw, "xdp", Way::Direct("ipip"));
}

#[test]
fn by_snat_where_replies_of_others_come_back() {
    in_a_layout(Cni::Kindnet, "tc", Way::Tunnel);
}

/// Associations keep their way, and new ones take the other: directly, and by SNAT, which is what
/// `tunnel` means for SCTP.
#[test]
fn a_change_of_the_forwarding_cuts_none() {
    let mut cluster = Cluster::start(Lab::builder().pods(&[0, 1])).unwrap();
    let leases: Vec<_> =
        cluster.lab.nodes().iter().map(|node| lease::tunnels(node, &Family::BOTH, "ipip,udp")).collect();
    cluster.manifests.write("leases", &leases).unwrap();
    let web = |forwarding: &str| {
        service("cluster", Policy::Cluster, CLUSTER).annotation("traffic-policy.io/forwarding", forwarding)
    };
    cluster.manifests.apply(&web("direct"), &cluster.backends()).unwrap();
    cluster.launch(|agent| agent).unwrap();
    let lab = &cluster.lab;
    while_served(lab, "changes", |damaged| {
        let mut open: Vec<(Association<'_>, IpAddr)> = Vec::new();
        for (round, forwarding) in (0..).zip(["direct", "tunnel", "direct", "snat"]) {
            cluster.manifests.service(&web(forwarding)).unwrap();
            until(&format!("the node in front forwards by {forwarding}"), Duration::from_secs(10), || {
                let served = cluster.agents[0].json(&["services", "default/cluster"]).unwrap();
                served.as_array().unwrap().iter().all(|port| port["forwarding"] == forwarding)
            });
            for (family, port) in Family::BOTH.into_iter().zip([43_000 + round, 44_000 + round]) {
                let to = cluster.at(1, family, CLUSTER);
                let mut association = Association::new(lab.client().netns(), family, to, port, damaged);
                association.open();
                let is_direct = forwarding == "direct";
                let seen = if is_direct { lab.client().address(family) } else { lab.node(1).address(family) };
                open.push((association, seen));
            }
            for (association, seen) in &open {
                for length in [1, 1200] {
                    let what = format!("{} under {forwarding}", association.port);
                    assert_eq!(association.say(length), format!("pod-2-1 {seen} {length}"), "{what}");
                }
            }
        }
        open.into_iter().for_each(|(association, _)| association.shut_down());
    });
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
