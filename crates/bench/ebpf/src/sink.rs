//! Both ends of the wire: counts the packets that arrive as expected, and answers those that open a
//! connection.

use aya_ebpf::{
    btf_maps::{Array, PerCpuArray},
    helpers::bpf_redirect,
    macros::{btf_map, xdp},
    programs::XdpContext,
};
use traffic_policy_bench_ebpf::{
    FRAME_LENGTH,
    traffic::{Arrived, CLIENT_SEQUENCE, ENDPOINT_SEQUENCE, Sink, sink},
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

const SYN: u8 = 0x02;
const ACK: u8 = 0x10;

#[xdp(frags)]
pub fn sink_xdp(ctx: XdpContext) -> u32 {
    let md = ctx.ctx;
    let (data, end) = unsafe { ((*md).data as usize, (*md).data_end as usize) };
    if data + FRAME_LENGTH > end {
        return XDP_PASS;
    }
    let Some(expected) = SINK.get_ptr(0) else { return XDP_PASS };
    let (ip, tcp) = (data + 14, data + 34);
    unsafe {
        if load16::<12>(data) != 0x0800u16.to_be() || load8::<0>(ip) != 0x45 || load8::<9>(ip) != 6 {
            return XDP_PASS;
        }
        let (source, destination) = (load32::<12>(ip), load32::<16>(ip));
        let ports = Ports::from_wire(load32::<0>(tcp));
        let flags = load8::<13>(tcp);
        let arrived = if destination & (*expected).endpoint_mask == (*expected).endpoints {
            let right = ports.destination() == (*expected).target_port
                && ((*expected).source == 0 || source == (*expected).source);
            match (right, flags & SYN != 0) {
                (false, _) => Arrived::Wrong,
                (true, true) => Arrived::Opening,
                (true, false) => Arrived::Request,
            }
        } else if destination & (*expected).client_mask == (*expected).clients {
            let right = source == (*expected).frontend && ports.source() == (*expected).frontend_port;
            match (right, flags & SYN != 0) {
                (false, _) => Arrived::Wrong,
                (true, true) => Arrived::Answer,
                (true, false) => Arrived::Reply,
            }
        } else if destination == (*expected).frontend && ports.destination() == (*expected).frontend_port {
            Arrived::Untranslated
        } else {
            return XDP_PASS;
        };
        let wanted = (*expected).flags;
        if wanted & sink::VERIFY != 0 && !intact(ip, tcp) {
            return count(Arrived::Wrong);
        }
        match arrived {
            Arrived::Opening if wanted & sink::ANSWER != 0 => {
                turn(data, ENDPOINT_SEQUENCE, CLIENT_SEQUENCE + 1, SYN | ACK);
            }
            Arrived::Answer if wanted & sink::CONFIRM != 0 => {
                turn(data, CLIENT_SEQUENCE + 1, ENDPOINT_SEQUENCE + 1, ACK);
            }
            _ => return count(arrived),
        }
        count(arrived);
        // XDP_TX does not work here: a veth wakes a receiver without a program only for a redirect.
        bpf_redirect((*md).ingress_ifindex, 0) as u32
    }
}

#[inline(always)]
fn count(arrived: Arrived) -> u32 {
    if let Some(count) = ARRIVED.get_ptr_mut(arrived as u32) {
        unsafe { *count += 1 };
    }
    XDP_DROP
}

/// Turns a segment into the answer to itself.
#[inline(always)]
unsafe fn turn(data: usize, sequence: u32, acknowledged: u32, flags: u8) {
    let (ip, tcp) = (data + 14, data + 34);
    let (here, there) = (load32::<0>(data), load32::<6>(data));
    let (here_tail, there_tail) = (load16::<4>(data), load16::<10>(data));
    store32::<0>(data, there);
    store16::<4>(data, there_tail);
    store32::<6>(data, here);
    store16::<10>(data, here_tail);
    let (source, destination) = (load32::<12>(ip), load32::<16>(ip));
    store32::<12>(ip, destination);
    store32::<16>(ip, source);
    store32::<0>(tcp, load32::<0>(tcp).rotate_left(16));
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
        + 6u16.to_be() as u64
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
