//! A pod whose network stack is a program's own, behind a tap: as a virtual machine of Kata. Its
//! sockets are none of this kernel's.
//!
//! ```text
//! node: host side ── pod: eth0 ⇄ (tc: every frame is redirected) tap0 ── stack in this process
//! ```
//! <https://github.com/kata-containers/kata-containers/blob/main/docs/design/architecture/networking.md>

use std::os::fd::AsRawFd as _;
use std::time::Instant as Clock;

use smoltcp::iface::{Config, Interface, SocketSet};
use smoltcp::phy::{Medium, TunTapInterface, wait};
use smoltcp::socket::{tcp, udp};
use smoltcp::time::Instant;
use smoltcp::wire::{EthernetAddress, IpAddress, IpCidr, IpEndpoint, IpListenEndpoint};
use traffic_policy_testing::pace::scaled;

use super::*;

const QUESTION: &[u8] = b"there?\n";
/// A port that no kernel's socket has.
const FROM: u16 = 50_000;

/// The stack of a pod that has none in this kernel.
struct UserStack {
    device: TunTapInterface,
    interface: Interface,
}

impl UserStack {
    /// Puts a stack behind the pod's device, in the pod's namespace, whose thread this must be. It
    /// has the pod's addresses and MAC address, as a virtual machine's card has.
    fn start(pod: &Pod, gateways: [IpAddr; 2], mac: [u8; 6]) -> Self {
        let mut device = TunTapInterface::new("tap0", Medium::Ethernet).unwrap();
        let redirect = |from, to| {
            format!(
                "qdisc add dev {from} ingress\n\
                 filter add dev {from} parent ffff: protocol all u32 match u8 0 0 \
                 action mirred egress redirect dev {to}\n"
            )
        };
        pod.netns().netlink(async |net| net.up("tap0").await).unwrap();
        let both = redirect("eth0", "tap0") + &redirect("tap0", "eth0");
        pod.netns().feed("tc", &["-batch", "-"], &both).unwrap();
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
}

/// Asks both Services of the scene by both families, from a stack behind the device of the client.
/// Returns the answers, of TCP and UDP in turn.
fn answers(scene: &Scene, limit: Duration) -> Vec<Option<Answer>> {
    let pod = scene.client();
    let node = scene.cluster.lab.node(1);
    let gateways = Family::BOTH.map(|family| node.pods_gateway().of(family));
    pod.netns().run(|| {
        let mut stack = UserStack::start(pod, gateways, mac("eth0"));
        let mut answers = Vec::new();
        for (number, family) in Family::BOTH.into_iter().enumerate() {
            let port = FROM + u16::try_from(number).unwrap() * 10;
            for service in [10, 11] {
                let port = port + u16::from(service);
                answers.push(stack.ask_tcp(at(service, family), port, limit));
                answers.push(stack.ask_udp(at(service, family), port, limit));
            }
        }
        answers
    })
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

fn is_served_in(cni: Cni) {
    let Some(scene) = Scene::start(Some(cni), ON, prepare) else { return };
    let answers = answers(&scene, scaled(Duration::from_secs(10)));
    assert_eq!(answers.len(), 8);
    for (number, answer) in answers.into_iter().enumerate() {
        let answer = answer.unwrap_or_else(|| panic!("{cni:?}: question {number} has no answer"));
        let client = answer.client.ip();
        assert!(Family::BOTH.iter().any(|family| scene.client().address(*family) == client), "{answer:?}");
        assert_eq!(answer.node, if number / 2 % 2 == 0 { "node-1" } else { "node-2" }, "{cni:?} {number}");
    }
}

#[test]
fn behind_a_routed_veth() {
    is_served_in(Cni::Kindnet);
}

#[test]
fn behind_a_port_of_a_bridge() {
    is_served_in(Cni::FlannelHostGw);
}

/// The same stack has no Services without the flag; but pods' own addresses answer it.
#[test]
fn has_no_services_without_the_flag() {
    let Some(scene) = Scene::start(Some(Cni::Kindnet), OFF, prepare) else { return };
    let none = answers(&scene, Duration::from_secs(1));
    assert!(none.iter().all(Option::is_none), "{none:?}");
}
