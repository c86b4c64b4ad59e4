//! Both ends of the wire: counts the packets that arrive as expected, and answers those that open a
//! connection.

use aya_ebpf::{
    btf_maps::{Array, PerCpuArray},
    helpers::bpf_redirect,
    macros::{btf_map, classifier, xdp},
    programs::{TcContext, XdpContext},
};
use traffic_policy_bench_ebpf::{
    FRAME_LENGTH,
    traffic::{Arrived, CLIENT_SEQUENCE, ENDPOINT_SEQUENCE, SEGMENT, Sink, sink},
};
use traffic_policy_ebpf::{
    abi::Ports,
    checksum::{self, word_sum},
    words::{load8, load16, load32, store8, store16, store32},
};

#[btf_map]
pub static SINK: Array<Sink, 1> = Array::new();
#[btf_map]
pub static ARRIVED: PerCpuArray<u64, { Arrived::COUNT }> = PerCpuArray::new();

const XDP_DROP: u32 = 1;
const XDP_PASS: u32 = 2;
const TC_NEXT: i32 = -1;
const TC_SHOT: i32 = 2;

const SYN: u8 = 0x02;
const ACK: u8 = 0x10;

const TCP: u8 = 6;
const UDP: u8 = 17;

/// Fate of a packet.
#[derive(PartialEq, Eq)]
enum Fate {
    /// A packet of somebody else, such as ARP: handed to the stack.
    Passed,
    Counted,
    /// The packet was rewritten into its own answer, which leaves by the device of this ifindex; 0:
    /// by the one by which it came.
    Answered(u32),
}

#[xdp(frags)]
pub fn sink_xdp(ctx: XdpContext) -> u32 {
    let md = ctx.ctx;
    unsafe {
        match receive((*md).data as usize, (*md).data_end as usize) {
            Fate::Passed => XDP_PASS,
            Fate::Counted => XDP_DROP,
            // XDP_TX does not work here: a veth wakes a receiver without a program only for a
            // redirect.
            Fate::Answered(0) => bpf_redirect((*md).ingress_ifindex, 0) as u32,
            Fate::Answered(device) => bpf_redirect(device, 0) as u32,
        }
    }
}

/// The same for a pod's device: what is redirected into a pod does not pass XDP there.
#[classifier]
pub fn sink_tc(ctx: TcContext) -> i32 {
    let skb = ctx.skb.skb;
    unsafe {
        match receive((*skb).data as usize, (*skb).data_end as usize) {
            Fate::Passed => TC_NEXT,
            Fate::Counted => TC_SHOT,
            Fate::Answered(_) => bpf_redirect((*skb).ifindex, 0) as i32,
        }
    }
}

#[inline(always)]
fn receive(data: usize, end: usize) -> Fate {
    if data + FRAME_LENGTH > end {
        return Fate::Passed;
    }
    let Some(expected) = SINK.get_ptr(0) else { return Fate::Passed };
    let (ip, l4) = (data + 14, data + 34);
    unsafe {
        let protocol = load8::<9>(ip);
        let tcp = protocol == TCP;
        if load16::<12>(data) != 0x0800u16.to_be() || load8::<0>(ip) != 0x45 || !tcp && protocol != UDP {
            return Fate::Passed;
        }
        let (source, destination) = (load32::<12>(ip), load32::<16>(ip));
        let ports = Ports::from_wire(load32::<0>(l4));
        let opens = tcp && load8::<13>(l4) & SYN != 0;
        let arrived = if destination & (*expected).endpoint_mask == (*expected).endpoints {
            let right = ports.destination() == (*expected).target_port
                && source & (*expected).source_mask == (*expected).source;
            match (right, opens) {
                (false, _) => Arrived::Wrong,
                (true, true) => Arrived::Opening,
                (true, false) => Arrived::Request,
            }
        } else if destination & (*expected).client_mask == (*expected).clients {
            let right = source == (*expected).frontend && ports.source() == (*expected).frontend_port;
            match (right, opens) {
                (false, _) => Arrived::Wrong,
                (true, true) => Arrived::Answer,
                (true, false) => Arrived::Reply,
            }
        } else if destination == (*expected).frontend && ports.destination() == (*expected).frontend_port {
            Arrived::Untranslated
        } else {
            return Fate::Passed;
        };
        let wanted = (*expected).flags;
        let arrived = if wanted & sink::VERIFY != 0 && !intact(ip, l4) { Arrived::Wrong } else { arrived };
        count(arrived);
        match arrived {
            Arrived::Opening if wanted & sink::ANSWER != 0 => {
                turn(data);
                number(l4, ENDPOINT_SEQUENCE, CLIENT_SEQUENCE + 1, SYN | ACK);
            }
            Arrived::Answer if wanted & sink::CONFIRM != 0 => {
                turn(data);
                number(l4, CLIENT_SEQUENCE + 1, ENDPOINT_SEQUENCE + 1, ACK);
                let device = (*expected).device;
                if device != 0 {
                    store32::<0>(data, (*expected).mac);
                    store16::<4>(data, (*expected).mac_tail as u16);
                }
                return Fate::Answered(device);
            }
            Arrived::Request if wanted & sink::ECHO != 0 => {
                turn(data);
                if tcp {
                    number(l4, ENDPOINT_SEQUENCE + 1 + SEGMENT, CLIENT_SEQUENCE + 1, ACK);
                }
            }
            _ => return Fate::Counted,
        }
        Fate::Answered(0)
    }
}

#[inline(always)]
fn count(arrived: Arrived) {
    if let Some(count) = ARRIVED.get_ptr_mut(arrived as u32) {
        unsafe { *count += 1 };
    }
}

/// Exchanges both ends of a packet, which changes no checksum.
#[inline(always)]
unsafe fn turn(data: usize) {
    let (ip, l4) = (data + 14, data + 34);
    let (here, there) = (load32::<0>(data), load32::<6>(data));
    let (here_tail, there_tail) = (load16::<4>(data), load16::<10>(data));
    store32::<0>(data, there);
    store16::<4>(data, there_tail);
    store32::<6>(data, here);
    store16::<10>(data, here_tail);
    let (source, destination) = (load32::<12>(ip), load32::<16>(ip));
    store32::<12>(ip, destination);
    store32::<16>(ip, source);
    store32::<0>(l4, load32::<0>(l4).rotate_left(16));
}

/// Sets the numbers and flags of a segment.
#[inline(always)]
unsafe fn number(tcp: usize, sequence: u32, acknowledged: u32, flags: u8) {
    let old = word_sum(load32::<4>(tcp)) + word_sum(load32::<8>(tcp)) + load16::<12>(tcp) as u64;
    store32::<4>(tcp, sequence.to_be());
    store32::<8>(tcp, acknowledged.to_be());
    store8::<13>(tcp, flags);
    let new = word_sum(sequence.to_be()) + word_sum(acknowledged.to_be()) + load16::<12>(tcp) as u64;
    store16::<16>(tcp, checksum::update(load16::<16>(tcp), checksum::delta(old, new)));
}

/// Whether both checksums are right.
#[inline(always)]
unsafe fn intact(ip: usize, tcp: usize) -> bool {
    let header = load32::<0>(ip) as u64
        + load32::<4>(ip) as u64
        + load32::<8>(ip) as u64
        + load32::<12>(ip) as u64
        + load32::<16>(ip) as u64;
    // The pseudo header: addresses, protocol and length (RFC 9293 section 3.1).
    let pseudo = load32::<12>(ip) as u64
        + load32::<16>(ip) as u64
        + (load8::<9>(ip) as u16).to_be() as u64
        + ((FRAME_LENGTH - 34) as u16).to_be() as u64;
    let segment = load32::<0>(tcp) as u64
        + load32::<4>(tcp) as u64
        + load32::<8>(tcp) as u64
        + load32::<12>(tcp) as u64
        + load32::<16>(tcp) as u64
        + load32::<20>(tcp) as u64
        + load32::<24>(tcp) as u64
        + load32::<28>(tcp) as u64
        + load32::<32>(tcp) as u64
        + load32::<36>(tcp) as u64
        + load32::<40>(tcp) as u64
        + load16::<44>(tcp) as u64;
    checksum::fold(header) == 0xffff && checksum::fold(pseudo + segment) == 0xffff
}
