//! Path MTU discovery: the client learns the MTU of a tunnel or of a narrowed route by ICMP, and
//! large transfers arrive.

use std::net::{SocketAddr, UdpSocket};
use std::process::Command;
use std::time::Duration;

use traffic_policy_testing::capture::{Capture, Frame};
use traffic_policy_testing::lab::{Family, Node, Pod};
use traffic_policy_testing::pace::scaled;
use traffic_policy_testing::traffic::transfer::transfer;

use crate::testbed::{REMOTE, Testbed};

const BYTES: u64 = 400_000;
/// The MTU of the client's link.
const LINK: usize = 1500;

/// Sets the MTU of the node's route to one of its pods to 1300 bytes.
pub fn narrow(node: &Node, pod: &Pod) {
    for family in Family::BOTH {
        let address = pod.address(family);
        let device = ip(node, &["-o", "route", "get", &address.to_string()]);
        let device = device.split(" dev ").nth(1).unwrap().split(' ').next().unwrap();
        let (prefix, mtu) = if family == Family::V4 {
            (32, &["mtu", "lock", "1300"][..])
        } else {
            (128, &["mtu", "1300"][..])
        };
        let route = format!("{address}/{prefix}");
        ip(node, &[&["route", "replace", &route, "dev", device][..], mtu].concat());
    }
}

fn ip(node: &Node, arguments: &[&str]) -> String {
    let mut command = Command::new("ip");
    command.args(arguments);
    let output = node.netns().output(command).unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// The MTU that ICMP reports to the client in each family, while it sends to a pod of node-2 by
/// node-1: a stream, whose segments are no longer than the pod's MSS, and a datagram as long as the
/// client's own link allows, until it is answered.
pub fn told(testbed: &Testbed) -> [Option<u16>; 2] {
    let cluster = &testbed.cluster;
    let client = cluster.lab.client().netns();
    Family::BOTH.map(|family| {
        let to = cluster.at(1, family, REMOTE);
        let capture = Capture::start(client, "eth0").unwrap();
        transfer(client, to, BYTES).unwrap();
        assert!(client.run(|| long_datagram(to)), "{to}: no answer to a datagram of {LINK} bytes");
        let frames = capture.finish_valid().unwrap();
        frames.iter().find_map(|frame| mtu_in_error_of(frame, to))
    })
}

/// Whether a datagram of [`LINK`] bytes is answered: not the first one, which has to be fragmented
/// once the client knows the MTU.
fn long_datagram(to: SocketAddr) -> bool {
    let any: SocketAddr = if to.is_ipv4() { ([0; 4], 0).into() } else { ([0u16; 8], 0).into() };
    let socket = UdpSocket::bind(any).unwrap();
    socket.connect(to).unwrap();
    socket.set_read_timeout(Some(scaled(Duration::from_millis(300)))).unwrap();
    let (headers, mut answer) = (if to.is_ipv4() { 28 } else { 48 }, [0; 4096]);
    // An error is the ICMP message, which a connected socket reports.
    (0..20).any(|_| socket.send(&vec![b'x'; LINK - headers]).is_ok() && socket.recv(&mut answer).is_ok())
}

/// The MTU in a "fragmentation needed" or "packet too big" from `to` about a packet to `to`.
fn mtu_in_error_of(frame: &Frame, to: SocketAddr) -> Option<u16> {
    let bytes = &frame.bytes;
    let (ethertype, protocol, source, icmp, wanted, quoted_port) = match to {
        SocketAddr::V4(_) => ([0x08, 0x00], bytes[23] == 1, 26..30, 34, [3, 4], 34 + 8 + 20 + 2),
        SocketAddr::V6(_) => ([0x86, 0xdd], bytes[20] == 58, 22..38, 54, [2, 0], 54 + 8 + 40 + 2),
    };
    let address = match to {
        SocketAddr::V4(to) => to.ip().octets().to_vec(),
        SocketAddr::V6(to) => to.ip().octets().to_vec(),
    };
    let is_it = bytes[12..14] == ethertype
        && protocol
        && bytes[source] == address
        && bytes[icmp..icmp + 2] == wanted
        && bytes[quoted_port..quoted_port + 2] == to.port().to_be_bytes();
    // Both have it in the last two bytes before the packet that they quote.
    is_it.then(|| u16::from_be_bytes([bytes[icmp + 6], bytes[icmp + 7]]))
}
