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
/// The index of the last two instructions of the filter: it refuses the packet, or takes it.
const REFUSE: u8 = 21;
const TAKE: u8 = REFUSE + 1;

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
fn filter() -> [SockFilter; 23] {
    let at = |code, offset| SockFilter::new(code, 0, 0, offset);
    let jump = |code, value, here: u8, then: u8, other: u8| {
        SockFilter::new(code, then - here - 1, other - here - 1, value)
    };
    let port = u32::from(GUE_PORT.to_host());
    [
        at(LOAD_BYTE, 0),
        at(AND, 0xf0),
        jump(IF_EQUAL, 0x40, 2, 3, 12),
        // IPv4: the protocol.
        at(LOAD_BYTE, 9),
        jump(IF_EQUAL, 4, 4, TAKE, 5),
        jump(IF_EQUAL, 6, 5, 6, 8),
        at(LOAD_BYTE, 20 + 13),
        jump(IF_SET, 0x04, 7, TAKE, REFUSE),
        jump(IF_EQUAL, 17, 8, 9, REFUSE),
        at(LOAD_HALF, 20 + 2),
        jump(IF_EQUAL, port, 10, TAKE, REFUSE),
        at(RETURN, 0),
        jump(IF_EQUAL, 0x60, 12, 13, REFUSE),
        // IPv6: the next header.
        at(LOAD_BYTE, 6),
        jump(IF_EQUAL, 41, 14, TAKE, 15),
        jump(IF_EQUAL, 6, 15, 16, 18),
        at(LOAD_BYTE, 40 + 13),
        jump(IF_SET, 0x04, 17, TAKE, REFUSE),
        jump(IF_EQUAL, 17, 18, 19, REFUSE),
        at(LOAD_HALF, 40 + 2),
        jump(IF_EQUAL, port, 20, TAKE, REFUSE),
        at(RETURN, 0),
        at(RETURN, u32::MAX),
    ]
}
