//! `--local-delivery direct`: packets of established flows to pods of the node, and their replies,
//! bypass the stack; connections begin and end in it. Layouts of network plugins and rules need
//! `nft` and `ip`: without them tests are skipped.

mod both_ways;
mod changes;
mod left_to_the_stack;
mod netkit;
mod read_only;
mod rules;

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::time::{Duration, Instant};

use traffic_policy_testing::agent::Agent;
use traffic_policy_testing::cluster::Cluster;
use traffic_policy_testing::lab::{Cni, Family, Lab, Node};
use traffic_policy_testing::netlink;
use traffic_policy_testing::object::{Backend, Policy};
use traffic_policy_testing::pace::scaled;
use traffic_policy_testing::skipped;
use traffic_policy_testing::traffic::Answer;

const PORT: u16 = 30080;
const PATIENCE: Duration = Duration::from_secs(20);
const DIRECT: &[&str] = &["--local-delivery", "direct"];
const STACK: &[&str] = &[];
/// The number of requests after which it shows which way they take.
const QUESTIONS: u64 = 200;

/// A node with a pod, in the layout of a plugin, whose agent has these flags.
struct Scene {
    agent: Agent,
    cluster: Cluster,
}

impl Scene {
    /// Returns a scene with a ready agent; `None` if a program is missing that the layout needs.
    fn start(cni: Cni, attach: &str, flags: &[&str]) -> Option<Self> {
        Self::start_with(cni, attach, flags, |_| ())
    }

    /// Starts like [`Self::start`], after a change of the node.
    fn start_with(cni: Cni, attach: &str, flags: &[&str], change: impl Fn(&Node)) -> Option<Self> {
        if let Some(program) = Cni::missing_program() {
            skipped("local_delivery", format!("there is no {program}"));
            return None;
        }
        let lab = Lab::builder().pods(&[1]).cni(cni).wire_offloads(attach == "tc");
        let cluster = Cluster::start(lab).unwrap();
        let node = cluster.lab.node(1);
        let backend = Backend::of(node.pod(1));
        cluster.manifests.apply(&Cluster::node_port("web", Policy::Local, PORT), &[backend]).unwrap();
        change(node);
        let agent = Agent::builder(&cluster.lab, node).attach(attach).flags(flags).start().unwrap();
        agent.wait_ready(PATIENCE).unwrap();
        Some(Self { agent, cluster })
    }

    fn node(&self) -> &Node {
        self.cluster.lab.node(1)
    }

    fn at(&self, family: Family) -> SocketAddr {
        self.cluster.at(1, family, PORT)
    }

    fn connect(&self, to: SocketAddr) -> BufReader<TcpStream> {
        let connect = || TcpStream::connect_timeout(&to, scaled(PATIENCE));
        let stream = self.cluster.lab.client().netns().run(connect).unwrap();
        stream.set_read_timeout(Some(scaled(PATIENCE))).unwrap();
        stream.set_write_timeout(Some(scaled(PATIENCE))).unwrap();
        BufReader::new(stream)
    }

    /// A socket of the client that is connected to the Service, with the port that it has from now
    /// on.
    fn datagrams(&self, to: SocketAddr) -> UdpSocket {
        let socket = self.cluster.lab.client().netns().run(|| {
            let socket = UdpSocket::bind(if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" }).unwrap();
            socket.connect(to).unwrap();
            socket
        });
        socket.set_read_timeout(Some(scaled(Duration::from_secs(2)))).unwrap();
        socket
    }

    /// The packets that bypassed the stack: requests, replies.
    fn direct(&self) -> [u64; 2] {
        ["delivered-direct", "replied-direct"]
            .map(|outcome| self.agent.packets("tc-ingress", outcome).unwrap())
    }

    /// The name of the host side of the pod's device.
    fn pod_device(&self) -> String {
        let devices = self.node().netns().run(|| netlink::devices().unwrap());
        devices.into_iter().find(|name| name.starts_with("veth")).unwrap()
    }

    /// The packets that the host side of the pod's device has sent to the pod.
    fn sent_by_host_side(&self) -> u64 {
        let table = self.node().netns().run(|| fs::read_to_string("/proc/thread-self/net/dev")).unwrap();
        let device = format!("{}:", self.pod_device());
        let line = table.lines().find_map(|line| line.trim_start().strip_prefix(&device)).unwrap();
        // Eight columns for what is received come first; the second one counts packets.
        line.split_whitespace().nth(9).unwrap().parse().unwrap()
    }

    /// Asks again and again on an open connection, and returns how many packets bypassed the stack:
    /// requests, replies.
    #[track_caller]
    fn ask_often(&self, stream: &mut BufReader<TcpStream>) -> [u64; 2] {
        let before = self.direct();
        (0..QUESTIONS).for_each(|_| ask(stream));
        let now = self.direct();
        [now[0] - before[0], now[1] - before[1]]
    }

    fn ip(&self, commands: &str) {
        self.node().netns().feed("ip", &["-batch", "-"], commands).unwrap();
    }

    fn nft(&self, rules: &str) {
        self.node().netns().feed("nft", &["-f", "-"], rules).unwrap();
    }

    fn tc(&self, commands: &str) {
        self.node().netns().feed("tc", &["-batch", "-"], commands).unwrap();
    }

    fn sysctl(&self, name: &str) -> String {
        let path = format!("/proc/sys/net/netfilter/{name}");
        self.node().netns().run(|| fs::read_to_string(path)).unwrap().trim().to_owned()
    }
}

/// Asks once on an open connection.
#[track_caller]
fn ask(stream: &mut BufReader<TcpStream>) {
    stream.get_mut().write_all(b"there?\n").unwrap();
    let mut line = String::new();
    stream.read_line(&mut line).unwrap();
    Answer::parse(&line).unwrap();
}

/// Whether a datagram is answered.
fn is_answered(socket: &UdpSocket) -> bool {
    let mut buffer = [0; 2048];
    socket.send(b"there?\n").unwrap();
    socket.recv(&mut buffer).is_ok()
}

/// Asks by datagrams until the flow counts as a stream, two seconds after its first one.
fn make_stream(socket: &UdpSocket) {
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_millis(2500) {
        assert!(is_answered(socket));
        // Its age is what counts, not the number of datagrams.
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Most of the packets, which shows the way that is taken: a few confirm it by the stack.
const MOST: u64 = QUESTIONS * 9 / 10;
const FEW: u64 = QUESTIONS / 5;
