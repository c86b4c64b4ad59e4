//! A pod whose network stack is a program's own: its sockets are none of this kernel's.
//!
//! ```text
//! Kata      node: host side ── pod: eth0 ⇄ (tc: every frame is redirected) tap0 ── stack in this process
//! KubeVirt  node: host side ── pod: eth0 ── k6t-eth0 (bridge) ── tap0 ── stack in this process
//! gVisor    node: host side ── pod: eth0 ── AF_PACKET ── stack in this process
//! ```
//! <https://github.com/kata-containers/kata-containers/blob/main/docs/design/architecture/networking.md>,
//! <https://kubevirt.io/user-guide/network/interfaces_and_networks/#bridge>,
//! <https://github.com/google/gvisor/blob/master/pkg/tcpip/link/fdbased/endpoint.go>

use std::os::fd::{AsRawFd, RawFd};
use std::time::Instant as Clock;

use smoltcp::iface::{Config, Interface, SocketSet};
use smoltcp::phy::{Checksum, Device, DeviceCapabilities, Medium, RawSocket, TunTapInterface, wait};
use smoltcp::socket::{tcp, udp};
use smoltcp::time::Instant;
use smoltcp::wire::{EthernetAddress, IpAddress, IpCidr, IpEndpoint, IpListenEndpoint};
use traffic_policy_testing::pace::scaled;

use super::*;

const QUESTION: &[u8] = b"there?\n";
/// A port that no kernel's socket has.
const FROM: u16 = 50_000;

/// A packet socket. A frame that has not left this kernel may have a checksum that no card has
/// finished.
struct PacketSocket(RawSocket);

impl AsRawFd for PacketSocket {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

impl Device for PacketSocket {
    type RxToken<'a> = <RawSocket as Device>::RxToken<'a>;
    type TxToken<'a> = <RawSocket as Device>::TxToken<'a>;

    fn receive(&mut self, now: Instant) -> Option<(Self::RxToken<'_>, Self::TxToken<'_>)> {
        self.0.receive(now)
    }

    fn transmit(&mut self, now: Instant) -> Option<Self::TxToken<'_>> {
        self.0.transmit(now)
    }

    fn capabilities(&self) -> DeviceCapabilities {
        let mut capabilities = self.0.capabilities();
        capabilities.checksum.tcp = Checksum::Tx;
        capabilities.checksum.udp = Checksum::Tx;
        capabilities
    }
}

/// The way from the pod's device to the stack.
#[derive(Clone, Copy, Debug)]
enum Behind {
    Redirects,
    Bridge,
    PacketSocket,
}

impl Behind {
    /// Asks from a stack behind the pod's device, in the pod's namespace, whose thread this must
    /// be.
    fn answers(self, pod: &Pod, gateways: [IpAddr; 2], limit: Duration) -> Vec<Option<Answer>> {
        let card = mac("eth0");
        let ip = |commands: &str| pod.netns().feed("ip", &["-batch", "-"], commands).unwrap();
        let tap = || {
            let tap = TunTapInterface::new("tap0", Medium::Ethernet).unwrap();
            pod.netns().netlink(async |net| net.up("tap0").await).unwrap();
            tap
        };
        match self {
            Self::Redirects => {
                let device = tap();
                let redirect = |from, to| {
                    format!(
                        "qdisc add dev {from} ingress\n\
                         filter add dev {from} parent ffff: protocol all u32 match u8 0 0 \
                         action mirred egress redirect dev {to}\n"
                    )
                };
                let both = redirect("eth0", "tap0") + &redirect("tap0", "eth0");
                pod.netns().feed("tc", &["-batch", "-"], &both).unwrap();
                UserStack::start(device, pod, gateways, card).ask_all(limit)
            }
            // The device loses its addresses, and its MAC address to the machine. The bridge must
            // not learn from it what a port with hairpin reflects.
            Self::Bridge => {
                let device = tap();
                ip("addr flush dev eth0\nlink set eth0 down\nlink set eth0 address 02:00:00:00:0b:0b\n\
                    link add k6t-eth0 type bridge mcast_snooping 0 forward_delay 0\nlink set k6t-eth0 up\n\
                    link set eth0 master k6t-eth0 up\nlink set eth0 type bridge_slave learning off\nlink set tap0 master k6t-eth0\n");
                UserStack::start(device, pod, gateways, card).ask_all(limit)
            }
            Self::PacketSocket => {
                ip("addr flush dev eth0\n");
                let socket = RawSocket::new("eth0", Medium::Ethernet).unwrap();
                UserStack::start(PacketSocket(socket), pod, gateways, card).ask_all(limit)
            }
        }
    }
}

/// The stack of a pod that has none in this kernel.
struct UserStack<D> {
    device: D,
    interface: Interface,
}

impl<D: Device + AsRawFd> UserStack<D> {
    /// Starts a stack with the pod's addresses and MAC address, as a virtual machine's card has
    /// them.
    fn start(mut device: D, pod: &Pod, gateways: [IpAddr; 2], mac: [u8; 6]) -> Self {
        let config = Config::new(EthernetAddress(mac).into());
        let mut interface = Interface::new(config, &mut device, Instant::now());
        interface.update_ip_addrs(|addresses| {
            for family in Family::BOTH {
                addresses.push(IpCidr::new(pod.address(family).into(), family.prefix())).unwrap();
            }
        });
        for gateway in gateways {
            match IpAddress::from(gateway) {
                IpAddress::Ipv4(gateway) => drop(interface.routes_mut().add_default_ipv4_route(gateway)),
                IpAddress::Ipv6(gateway) => drop(interface.routes_mut().add_default_ipv6_route(gateway)),
            }
        }
        Self { device, interface }
    }

    /// Works until `done` returns something, or for so long.
    fn work<T>(
        &mut self,
        sockets: &mut SocketSet<'_>,
        limit: Duration,
        mut done: impl FnMut(&mut SocketSet<'_>, &mut Interface) -> Option<T>,
    ) -> Option<T> {
        let begun = Clock::now();
        while begun.elapsed() < limit {
            self.interface.poll(Instant::now(), &mut self.device, sockets);
            if let Some(found) = done(sockets, &mut self.interface) {
                self.interface.poll(Instant::now(), &mut self.device, sockets);
                return Some(found);
            }
            // Not longer: the stack has timers of its own.
            let most = smoltcp::time::Duration::from_millis(5);
            wait(self.device.as_raw_fd(), Some(most)).unwrap();
        }
        None
    }

    /// Asks over TCP; `None` without an answer.
    fn ask_tcp(&mut self, to: SocketAddr, from: u16, limit: Duration) -> Option<Answer> {
        let buffer = || tcp::SocketBuffer::new(vec![0; 4096]);
        let mut sockets = SocketSet::new(Vec::new());
        let handle = sockets.add(tcp::Socket::new(buffer(), buffer()));
        let socket = sockets.get_mut::<tcp::Socket<'_>>(handle);
        let endpoint = IpEndpoint::from(to);
        socket.connect(self.interface.context(), endpoint, IpListenEndpoint::from(from)).unwrap();
        let (mut asked, mut line) = (false, Vec::new());
        let answer = self.work(&mut sockets, limit, |sockets, _| {
            let socket = sockets.get_mut::<tcp::Socket<'_>>(handle);
            if socket.can_send() && !asked {
                socket.send_slice(QUESTION).unwrap();
                asked = true;
            }
            if socket.can_recv() {
                socket.recv(|bytes| (bytes.len(), line.extend_from_slice(bytes))).unwrap();
            }
            let text = std::str::from_utf8(&line).unwrap();
            text.ends_with('\n').then(|| Answer::parse(text.trim_end()).unwrap())
        });
        sockets.get_mut::<tcp::Socket<'_>>(handle).close();
        self.work(&mut sockets, scaled(Duration::from_secs(1)), |sockets, _| {
            (!sockets.get_mut::<tcp::Socket<'_>>(handle).is_open()).then_some(())
        });
        answer
    }

    /// Asks by datagrams, one every 200 ms; `None` without an answer.
    fn ask_udp(&mut self, to: SocketAddr, from: u16, limit: Duration) -> Option<Answer> {
        let buffer = || udp::PacketBuffer::new(vec![udp::PacketMetadata::EMPTY; 8], vec![0; 8192]);
        let mut sockets = SocketSet::new(Vec::new());
        let handle = sockets.add(udp::Socket::new(buffer(), buffer()));
        sockets.get_mut::<udp::Socket<'_>>(handle).bind(from).unwrap();
        let mut sent = None::<Clock>;
        self.work(&mut sockets, limit, |sockets, _| {
            let socket = sockets.get_mut::<udp::Socket<'_>>(handle);
            if sent.is_none_or(|sent| sent.elapsed() > Duration::from_millis(200)) {
                socket.send_slice(QUESTION, IpEndpoint::from(to)).unwrap();
                sent = Some(Clock::now());
            }
            let (bytes, meta) = socket.recv().ok()?;
            assert_eq!(meta.endpoint, IpEndpoint::from(to), "the answer comes from elsewhere");
            Some(Answer::parse(std::str::from_utf8(bytes).unwrap()).unwrap())
        })
    }

    /// Asks both Services of the scene by both families. Returns the answers, of TCP and UDP in
    /// turn.
    fn ask_all(mut self, limit: Duration) -> Vec<Option<Answer>> {
        let mut answers = Vec::new();
        for (number, family) in Family::BOTH.into_iter().enumerate() {
            let port = FROM + u16::try_from(number).unwrap() * 10;
            for service in [10, 11] {
                let port = port + u16::from(service);
                answers.push(self.ask_tcp(at(service, family), port, limit));
                answers.push(self.ask_udp(at(service, family), port, limit));
            }
        }
        answers
    }
}

/// Each kind of stack, with the pod of the first node that gets it.
const STACKS: [(Behind, usize); 3] = [(Behind::Redirects, 1), (Behind::Bridge, 3), (Behind::PacketSocket, 4)];

/// Starts a scene with a pod for each kind of stack, and one for an endpoint.
fn start(cni: Cni, flags: &[&str]) -> Option<Scene> {
    Scene::start_with([4, 2], 1, Some(cni), flags, prepare)
}

/// Asks from a stack behind the device of a pod.
fn answers(scene: &Scene, pod: &Pod, behind: Behind, limit: Duration) -> Vec<Option<Answer>> {
    let node = scene.cluster.lab.node(1);
    let gateways = Family::BOTH.map(|family| node.pods_gateway().of(family));
    pod.netns().run(|| behind.answers(pod, gateways, limit))
}

/// The MAC address of a device of the calling thread's namespace.
fn mac(device: &str) -> [u8; 6] {
    let shown = std::process::Command::new("ip").args(["-json", "link", "show", device]).output().unwrap();
    let links: serde_json::Value = serde_json::from_slice(&shown.stdout).unwrap();
    let text = links[0]["address"].as_str().unwrap();
    let bytes: Vec<u8> = text.split(':').map(|byte| u8::from_str_radix(byte, 16).unwrap()).collect();
    bytes.try_into().unwrap()
}

/// A Service with an endpoint on the pod's node, and one with an endpoint elsewhere.
fn prepare(cluster: &Cluster) {
    for (number, node, pod) in [(10, 1, 2), (11, 2, 1)] {
        let backend = Backend::of(cluster.lab.node(node).pod(pod));
        cluster.manifests.apply(&service(number), &[backend]).unwrap();
    }
}

fn are_served(cni: Cni) {
    let Some(scene) = start(cni, ON) else { return };
    for (behind, pod) in STACKS {
        let pod = scene.pod(1, pod);
        let answers = answers(&scene, pod, behind, scaled(Duration::from_secs(10)));
        assert_eq!(answers.len(), 8);
        for (number, answer) in answers.into_iter().enumerate() {
            let what = format!("{cni:?} {behind:?}: question {number}");
            let answer = answer.unwrap_or_else(|| panic!("{what} has no answer"));
            let client = answer.client.ip();
            assert!(Family::BOTH.iter().any(|family| pod.address(*family) == client), "{what}: {answer:?}");
            assert_eq!(answer.node, if number / 2 % 2 == 0 { "node-1" } else { "node-2" }, "{what}");
        }
    }
}

#[test]
fn behind_a_routed_veth() {
    are_served(Cni::Kindnet);
}

#[test]
fn behind_a_port_of_a_bridge() {
    are_served(Cni::FlannelHostGw);
}

/// The same stacks have no Services without the flag.
#[test]
fn has_no_services_without_the_flag() {
    let Some(scene) = start(Cni::Kindnet, OFF) else { return };
    for (behind, pod) in STACKS {
        let none = answers(&scene, scene.pod(1, pod), behind, Duration::from_secs(1));
        assert!(none.iter().all(Option::is_none), "{behind:?}: {none:?}");
    }
}
