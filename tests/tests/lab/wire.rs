//! What is on the wire: checksums with and without offload, and what XDP on a veth needs from the other end.

use std::io;
use std::mem::size_of;
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::time::Duration;

use etherparse::PacketBuilder;
use nix::libc;
use socket2::{Domain, Protocol, Socket, Type};
use traffic_policy_tests::capture::{Capture, Frame};
use traffic_policy_tests::checksum::Checksum;
use traffic_policy_tests::lab::{Family, Lab};
use traffic_policy_tests::netlink;
use traffic_policy_tests::traffic::server::Identity;
use traffic_policy_tests::traffic::transfer::transfer;
use traffic_policy_tests::traffic::{Faults, Ledger, Server};

const PORT: u16 = 8080;

/// The frames that arrive at node-1 while a client exchanges a megabyte with it.
fn frames_of_a_transfer(offloads: bool) -> Vec<Frame> {
    let lab = Lab::builder().nodes(1).wire_offloads(offloads).build().unwrap();
    let identity = Identity { pod: "host".to_owned(), node: "node-1".to_owned() };
    let node = lab.node(1);
    let _server = Server::start_in(node.netns(), PORT, identity, Faults::default(), &Ledger::default()).unwrap();
    let capture = Capture::start(node.netns(), "eth0").unwrap();
    for family in Family::BOTH {
        transfer(lab.client().netns(), SocketAddr::new(node.address(family), PORT), 1 << 20).unwrap();
    }
    capture.finish_valid().unwrap().into_iter().filter(|frame| !frame.outgoing).collect()
}

#[test]
fn without_offloads_every_checksum_on_the_wire_is_real() {
    let frames = frames_of_a_transfer(false);
    let unfinished = frames.iter().find(|frame| frame.checksum == Checksum::Unfinished);
    assert!(unfinished.is_none(), "{}", unfinished.unwrap());
    assert!(frames.iter().filter(|frame| frame.checksum == Checksum::Valid).count() > 100);
    let largest = frames.iter().map(|frame| frame.bytes.len()).max().unwrap();
    assert!(largest <= 1514, "{largest}");
}

#[test]
fn with_offloads_checksums_are_unfinished_and_segments_large() {
    let frames = frames_of_a_transfer(true);
    assert!(frames.iter().any(|frame| frame.checksum == Checksum::Unfinished));
    assert!(frames.iter().any(|frame| frame.bytes.len() > 1514));
}

#[test]
fn a_wrong_checksum_is_seen_by_capture_and_by_the_receiver() {
    let lab = Lab::builder().nodes(1).build().unwrap();
    let (node, client) = (lab.node(1), lab.client());
    let listener = client.netns().run(|| UdpSocket::bind((client.addresses.v4, PORT))).unwrap();
    listener.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
    let capture = Capture::start(client.netns(), "eth0").unwrap();
    let send = |damage: u8| {
        let mut packet = Vec::new();
        let ip = PacketBuilder::ipv4(node.addresses.v4.octets(), client.addresses.v4.octets(), 64);
        ip.udp(1000, PORT).write(&mut packet, b"hello").unwrap();
        *packet.last_mut().unwrap() ^= damage;
        node.netns().run(|| {
            // IPPROTO_RAW: the packet brings its own header.
            let socket = Socket::new(Domain::IPV4, Type::RAW, Some(Protocol::from(255))).unwrap();
            let to = SocketAddr::from((client.addresses.v4, 0));
            socket.send_to(&packet, &to.into()).unwrap();
        });
    };
    send(1);
    let mut buffer = [0; 64];
    let received = listener.recv(&mut buffer);
    assert_eq!(received.unwrap_err().kind(), io::ErrorKind::WouldBlock, "the receiver trusted its device");
    send(0);
    assert_eq!(listener.recv(&mut buffer).unwrap(), 5);
    let wrong = Checksum::Wrong("UDP".to_owned());
    let frames = capture.finish().unwrap();
    assert_eq!(frames.iter().filter(|frame| frame.checksum == wrong).count(), 1);
}

#[test]
fn frames_sent_by_xdp_arrive_only_at_a_peer_with_gro() {
    for (gro, expected) in [(true, 1), (false, 0)] {
        let lab = Lab::builder().nodes(1).build().unwrap();
        let (node, port) = (lab.node(1), "node-1");
        lab.router().set_gro(port, gro).unwrap();
        let _link = node.netns().run(|| reflect("eth0")).unwrap();
        let capture = Capture::start(lab.router(), port).unwrap();
        // Any frame will do; the one that is sent is an ARP request, which comes straight back.
        lab.router().run(|| {
            let socket = UdpSocket::bind("172.18.0.1:0").unwrap();
            socket.send_to(b"x", (node.addresses.v4, PORT)).unwrap();
        });
        std::thread::sleep(Duration::from_millis(300));
        let frames = capture.finish().unwrap();
        let arp = |frame: &&Frame| frame.bytes[12..14] == [8, 6];
        let (sent, back): (Vec<_>, Vec<_>) = frames.iter().filter(arp).partition(|frame| frame.outgoing);
        assert_eq!((sent.len(), back.len()), (1, expected), "GRO {gro}");
    }
}

/// Attaches, in native mode, a program that sends each frame back to where it came from.
fn reflect(device: &str) -> io::Result<OwnedFd> {
    const PROG_LOAD: libc::c_long = 5;
    const LINK_CREATE: libc::c_long = 28;
    const PROG_TYPE_XDP: u32 = 6;
    const ATTACH_TYPE_XDP: u32 = 37;
    const NATIVE: u32 = 1 << 2;

    #[repr(C)]
    #[derive(Default)]
    struct Load {
        program_type: u32,
        instructions: u32,
        code: u64,
        license: u64,
        rest: [u64; 13],
    }

    #[repr(C)]
    #[derive(Default)]
    struct Attach {
        program: u32,
        device: u32,
        attach_type: u32,
        flags: u32,
        rest: [u64; 14],
    }

    fn bpf<T>(command: libc::c_long, attributes: &T) -> io::Result<OwnedFd> {
        // SAFETY: the attributes are as long as said, and the code and license they point to outlive the call.
        let fd = unsafe { libc::syscall(libc::SYS_bpf, command, attributes, size_of::<T>()) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: both commands return a new descriptor.
        Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
    }

    // r0 = XDP_TX; exit
    let code: [u64; 2] = [0x0000_0003_0000_00b7, 0x95];
    let license = c"GPL";
    let load = Load {
        program_type: PROG_TYPE_XDP,
        instructions: 2,
        code: code.as_ptr() as u64,
        license: license.as_ptr() as u64,
        ..Load::default()
    };
    let program = bpf(PROG_LOAD, &load)?;
    let attach = Attach {
        program: program.as_raw_fd() as u32,
        device: netlink::index(device).map_err(io::Error::other)?,
        attach_type: ATTACH_TYPE_XDP,
        flags: NATIVE,
        ..Attach::default()
    };
    bpf(LINK_CREATE, &attach)
}
