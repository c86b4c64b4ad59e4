//! The packet socket that sees answers to questions before anything on this node drops or opens
//! them, and no other packet.

use std::io;

use socket2::{Domain, SockFilter, Socket, Type};
use traffic_policy_ebpf::abi::GUE_PORT;

use super::station;

/// linux/if_ether.h.
const ETH_P_ALL: u16 = 3;
/// linux/bpf_common.h: BPF_LD | BPF_ABS with BPF_B and BPF_H, BPF_ALU | BPF_AND, BPF_JMP | BPF_JEQ
/// and BPF_JSET, BPF_RET.
const LOAD_BYTE: u16 = 0x30;
const LOAD_HALF: u16 = 0x28;
const AND: u16 = 0x54;
const IF_EQUAL: u16 = 0x15;
const IF_SET: u16 = 0x45;
const RETURN: u16 = 0x06;
/// IPPROTO_TCP, IPPROTO_UDP, and the flag in byte 13 of a TCP header.
const TCP: u8 = 6;
const UDP: u8 = 17;
const RST: u32 = 0x04;

/// The number of instructions for a family, and the last two: one refuses, the other one takes.
const LENGTH: u8 = 10;
const REFUSE: u8 = LENGTH - 2;
const TAKE: u8 = LENGTH - 1;

/// Opens the socket. It hands out packets from their IP header on.
///
/// # Errors
/// CAP_NET_RAW is missing.
pub(super) fn open() -> io::Result<Socket> {
    // Without a protocol it sees nothing until the filter is there.
    let socket = Socket::new(Domain::PACKET, Type::DGRAM, None)?;
    socket.attach_filter(&filter())?;
    socket.bind(&station::of(0, [0; 6], ETH_P_ALL)?)?;
    Ok(socket)
}

/// Takes IP within IP, UDP to GUE's port, and segments of TCP with RST: a node may get a million
/// packets a second. Answers have neither options nor extension headers.
fn filter() -> Vec<SockFilter> {
    let (v4, v6) = (of_family(9, 4, 20), of_family(6, 41, 40));
    let mut all = vec![
        load(LOAD_BYTE, 0),
        SockFilter::new(AND, 0, 0, 0xf0),
        // The version: IPv4 behind the next instruction, IPv6 behind that.
        SockFilter::new(IF_EQUAL, 1, 0, 0x40),
        SockFilter::new(IF_EQUAL, LENGTH, REFUSE, 0x60),
    ];
    all.extend(v4.into_iter().chain(v6));
    all
}

/// Returns the part of a family, whose IP header has the protocol at `place`, names a packet of the
/// family within it `inner`, and has `length` bytes.
fn of_family(place: u32, inner: u32, length: u32) -> [SockFilter; LENGTH as usize] {
    let jump = |code, value, here: u8, then: u8, other: u8| {
        SockFilter::new(code, then - here - 1, other - here - 1, value)
    };
    [
        load(LOAD_BYTE, place),
        jump(IF_EQUAL, inner, 1, TAKE, 2),
        jump(IF_EQUAL, u32::from(TCP), 2, 3, 5),
        load(LOAD_BYTE, length + 13),
        jump(IF_SET, RST, 4, TAKE, REFUSE),
        jump(IF_EQUAL, u32::from(UDP), 5, 6, REFUSE),
        load(LOAD_HALF, length + 2),
        jump(IF_EQUAL, u32::from(GUE_PORT.to_host()), 7, TAKE, REFUSE),
        SockFilter::new(RETURN, 0, 0, 0),
        SockFilter::new(RETURN, 0, 0, u32::MAX),
    ]
}

const fn load(code: u16, place: u32) -> SockFilter {
    SockFilter::new(code, 0, 0, place)
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixDatagram;

    use etherparse::{IpNumber, PacketBuilder};

    use super::*;

    /// A filter of a datagram socket judges what is sent to it, whatever the address family.
    #[test]
    fn answers_alone_pass() {
        let (sender, receiver) = UnixDatagram::pair().unwrap();
        let receiver = Socket::from(std::os::fd::OwnedFd::from(receiver));
        receiver.attach_filter(&filter()).unwrap();
        receiver.set_nonblocking(true).unwrap();
        let passes = |packet: &[u8]| {
            sender.send(packet).unwrap();
            io::Read::read(&mut &receiver, &mut [0; 256]).is_ok()
        };
        let gue = GUE_PORT.to_host();
        for ipv6 in [false, true] {
            let ip = || {
                if ipv6 {
                    PacketBuilder::ipv6([1; 16], [2; 16], 64)
                } else {
                    PacketBuilder::ipv4([1; 4], [2; 4], 64)
                }
            };
            let tcp = |reset: bool| {
                let step = ip().tcp(gue, gue, 1, 1).ack(1);
                let step = if reset { step.rst() } else { step };
                let mut packet = Vec::new();
                step.write(&mut packet, &[0; 8]).unwrap();
                packet
            };
            let udp = |port| {
                let mut packet = Vec::new();
                ip().udp(gue, port).write(&mut packet, &[0; 8]).unwrap();
                packet
            };
            let within = |inner: IpNumber| {
                let mut packet = Vec::new();
                ip().write(&mut packet, inner, &[0; 40]).unwrap();
                packet
            };
            let [own, other] = [IpNumber::IPV4, IpNumber::IPV6].map(|number| {
                let is_own = (number == IpNumber::IPV6) == ipv6;
                (is_own, within(number))
            });
            for (wanted, packet) in [
                (true, tcp(true)),
                (false, tcp(false)),
                (true, udp(gue)),
                (false, udp(gue + 1)),
                own,
                other,
                (false, within(IpNumber::GRE)),
            ] {
                assert_eq!(passes(&packet), wanted, "{ipv6} {packet:x?}");
            }
        }
        assert!(!passes(&[0; 64]), "no IP");
    }
}
