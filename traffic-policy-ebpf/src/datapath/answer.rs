//! Refusals: packets that the program makes itself in place of the one it got (ICMP errors and TCP RST), and drops.

use traffic_policy_ebpf::{
    abi::{Bucket, NO_SERVICE, PROTOCOL_TCP, Scratch},
    checksum,
    outcome::{OUTCOMES, Outcome, Verdict},
};

use crate::datapath::{
    barrier::opaque,
    clock, counters,
    ctx::Packet,
    events::{self, Notice},
    extension,
    family::{V4, V6},
    flow::table::FlowTable,
    maps::{BUCKETS, STATE},
    parse::ETHERNET,
    rewrite::Rewrite,
    verdict::{self, Exit},
    words::{load8, load16, load32, load64, store8, store16, store32, store64},
};

/// How many jiffies' worth of answers one CPU may save up.
const BURST: u32 = 128;
const IP4: usize = 20;
const IP6: usize = 40;
const ICMP: usize = 8;
/// Largest IPv4 header, and the eight bytes after it that an error repeats (RFC 792).
const QUOTED4_WORDS: usize = (60 + 8) / 4;
/// The same for IPv6 with its extension headers.
const QUOTED6_WORDS: usize = (extension::REACH + 8) / 8;
const PROTOCOL_ICMP6: u8 = 58;
const TTL: u8 = 64;
/// RST in the word of data offset and flags: five words of header.
const RST_FLAGS: u16 = 0x5004u16.to_be();

/// A family for which answers can be built.
///
/// An answer comes from the address that the packet was sent to, as the kernel's `reject` does, and goes back to the MAC
/// that sent it. A frame whose checksum is still partial (from a veth neighbour) keeps its mark: it stays within the
/// machine, where nobody looks at the sum.
pub trait Answer: Rewrite {
    /// Type and code of ICMP errors.
    const PORT_UNREACHABLE: u16;
    const TTL_EXCEEDED: u16;
    const TOO_LONG: u16;

    /// Turns the packet into an ICMP error with `rest` as the last word of its header; false if it cannot be.
    fn error<P: Packet>(packet: P, kind: u16, rest: u32) -> bool;
    /// Turns a segment with ACK into the RST that RFC 9293 section 3.10.7.1 wants for it; false if it cannot be.
    fn reset<P: Packet>(packet: P) -> bool;
}

/// The program for what is refused: it answers the sender, if that is to be told and its turn has come, and notes it.
#[inline(always)]
pub fn run<P: Packet, F: Answer>(packet: P) -> i32 {
    let Some(scratch) = F::scratch() else {
        return verdict::leave(packet, P::HOOK, Outcome::DroppedInternalError.into());
    };
    // Masked: kernels before 6.18 do not carry a bound found on `number - n` back to `number`, which indexes the counters.
    let number = unsafe { (*scratch).outcome } & (OUTCOMES - 1);
    let exit = match Outcome::numbered(number) {
        Some(outcome) if matches!(outcome.verdict(), Verdict::Drop) => outcome.into(),
        _ => answer::<P, F>(packet),
    };
    let service = unsafe { service::<F>(scratch) };
    if !matches!(exit.outcome.verdict(), Verdict::Pass) {
        counters::add(service, exit.outcome, 1, unsafe { (*scratch).length } as u64, 0);
        events::tell::<F>(|| Notice {
            hook: P::HOOK,
            outcome: exit.outcome,
            service,
            ifindex: packet.ingress(),
            netns: 0,
            tuple: unsafe { (*scratch).key },
            endpoint: (F::Address::default(), 0),
        });
    }
    verdict::leave(packet, P::HOOK, exit)
}

/// The Service that refused the packet. The established path does not say: the flow knows.
#[inline(always)]
unsafe fn service<F: Answer>(scratch: *mut Scratch<F::Address>) -> u32 {
    let service = unsafe { (*scratch).service };
    if service != NO_SERVICE {
        return service;
    }
    let half = FlowTable::<F>::main().find(unsafe { &(*scratch).key });
    if half.is_null() { NO_SERVICE } else { unsafe { (*half).service } }
}

#[inline(always)]
fn answer<P: Packet, F: Answer>(packet: P) -> Exit {
    let Some(scratch) = F::scratch() else { return Outcome::DroppedInternalError.into() };
    let (number, mtu) = unsafe { ((*scratch).outcome, (*scratch).mtu) };
    if !take() {
        return Outcome::DroppedRateLimited.into();
    }
    let (outcome, kind, rest) = if number == Outcome::ResetNoFlow as u32 {
        (Outcome::ResetNoFlow, 0, 0)
    } else if number == Outcome::RejectedTtlExceeded as u32 {
        (Outcome::RejectedTtlExceeded, F::TTL_EXCEEDED, 0)
    } else if number == Outcome::RejectedMtuExceeded as u32 {
        (Outcome::RejectedMtuExceeded, F::TOO_LONG, mtu)
    } else if number == Outcome::RejectedUnknownPort as u32 {
        (Outcome::RejectedUnknownPort, F::PORT_UNREACHABLE, 0)
    } else {
        (Outcome::RejectedNoEndpoint, F::PORT_UNREACHABLE, 0)
    };
    let built = if kind == 0 { F::reset(packet) } else { F::error(packet, kind, rest) };
    if !built {
        // A frame that fills its buffer cannot become a longer answer in XDP; it is still as it came, and TC can.
        return if P::TC { Outcome::DroppedInternalError } else { Outcome::PassedToTc }.into();
    }
    Exit::sent(outcome, packet.send(packet.ingress()))
}

/// Takes a token of this CPU.
#[inline(always)]
fn take() -> bool {
    let (Some(bucket), Some(state)) = (BUCKETS.get_ptr_mut(0), STATE.get_ptr(0)) else { return false };
    let now = clock::jiffies();
    unsafe {
        let Bucket { tokens, filled } = *bucket;
        let rate = (*state).answers_per_jiffy;
        let elapsed = now.wrapping_sub(filled);
        let elapsed = if elapsed > BURST { BURST } else { elapsed };
        let full = rate.wrapping_mul(BURST);
        let tokens = tokens.wrapping_add(elapsed.wrapping_mul(rate));
        let tokens = if tokens > full { full } else { tokens };
        if tokens == 0 {
            return false;
        }
        *bucket = Bucket { tokens: tokens - 1, filled: now };
    }
    true
}

/// MAC addresses in the opposite order, taken before the frame is resized.
#[inline(always)]
unsafe fn swapped(data: usize) -> (u64, u32) {
    unsafe {
        let (to, from) =
            ([load32::<0>(data), load16::<4>(data) as u32], [load32::<6>(data), load16::<10>(data) as u32]);
        let first = from[0] as u64 | (from[1] as u64) << 32 | (to[0] as u64) << 48;
        (first, to[0] >> 16 | to[1] << 16)
    }
}

#[inline(always)]
unsafe fn store_macs(data: usize, (first, second): (u64, u32)) {
    unsafe {
        store64::<0>(data, first);
        store32::<8>(data, second);
    }
}

/// Sum of the 16-bit words of a 32-bit word.
#[inline(always)]
const fn words(word: u32) -> u64 {
    checksum::port_sum(word)
}

impl Answer for V4 {
    // RFC 792; RFC 1191 section 4 for the MTU in the last word.
    const PORT_UNREACHABLE: u16 = 0x0303;
    const TTL_EXCEEDED: u16 = 0x0b00;
    const TOO_LONG: u16 = 0x0304;

    #[inline(always)]
    fn error<P: Packet>(packet: P, kind: u16, rest: u32) -> bool {
        let data = packet.data();
        let ip = data + ETHERNET;
        if ip + IP4 > packet.end() {
            return false;
        }
        unsafe {
            let macs = swapped(data);
            let (client, frontend) = (load32::<12>(ip), load32::<16>(ip));
            let count = (load8::<0>(ip) as usize & 15) + 2;
            let mut quoted = [0u32; QUOTED4_WORDS];
            let mut sum = kind.to_be() as u64 + words(rest.to_be());
            for (i, word) in quoted.iter_mut().enumerate() {
                let at = ip + i * 4;
                if i >= count || at + 4 > packet.end() {
                    break;
                }
                *word = load32::<0>(at);
                sum += words(*word);
            }
            let length = IP4 + ICMP + count * 4;
            if !packet.resize((ETHERNET + length) as u32) {
                return false;
            }
            let data = packet.data();
            let ip = data + ETHERNET;
            if ip + IP4 + ICMP > packet.end() {
                return false;
            }
            store_macs(data, macs);
            header4(ip, length as u32, 1, frontend, client);
            let icmp = ip + IP4;
            store16::<0>(icmp, kind.to_be());
            store16::<2>(icmp, !checksum::fold(sum));
            store32::<4>(icmp, rest.to_be());
            for (i, word) in quoted.iter().enumerate() {
                let at = icmp + ICMP + i * 4;
                if i >= count || at + 4 > packet.end() {
                    break;
                }
                store32::<0>(at, *word);
            }
        }
        true
    }

    #[inline(always)]
    fn reset<P: Packet>(packet: P) -> bool {
        let data = packet.data();
        let ip = data + ETHERNET;
        if ip + IP4 > packet.end() {
            return false;
        }
        unsafe {
            let macs = swapped(data);
            let (client, frontend) = (load32::<12>(ip), load32::<16>(ip));
            let l4 = ip + ((load8::<0>(ip) as usize & 15) << 2);
            if l4 + 20 > packet.end() {
                return false;
            }
            let (ports, sequence) = (load32::<0>(l4).rotate_left(16), load32::<8>(l4));
            if !packet.resize((ETHERNET + IP4 + 20) as u32) {
                return false;
            }
            let data = packet.data();
            let ip = data + ETHERNET;
            if ip + IP4 + 20 > packet.end() {
                return false;
            }
            store_macs(data, macs);
            header4(ip, (IP4 + 20) as u32, PROTOCOL_TCP as u8, frontend, client);
            let pseudo = words(client) + words(frontend) + 6u16.to_be() as u64 + 20u16.to_be() as u64;
            segment(ip + IP4, ports, sequence, pseudo);
        }
        true
    }
}

/// An RST without data.
#[inline(always)]
unsafe fn segment(l4: usize, ports: u32, sequence: u32, pseudo: u64) {
    unsafe {
        store32::<0>(l4, ports);
        store32::<4>(l4, sequence);
        store32::<8>(l4, 0);
        store16::<12>(l4, RST_FLAGS);
        store16::<14>(l4, 0);
        store16::<16>(l4, !checksum::fold(pseudo + words(ports) + words(sequence) + RST_FLAGS as u64));
        store16::<18>(l4, 0);
    }
}

#[inline(always)]
unsafe fn header4(ip: usize, length: u32, protocol: u8, source: u32, destination: u32) {
    // Version 4, five words; length; DF; TTL and protocol, each pair as one word in memory order.
    let (first, length) = (0x4500u16.to_be(), (length as u16).to_be());
    let (fragment, ttl) = (0x4000u16.to_be(), u16::from_be_bytes([TTL, protocol]).to_be());
    let sum =
        first as u64 + length as u64 + fragment as u64 + ttl as u64 + words(source) + words(destination);
    unsafe {
        store16::<0>(ip, first);
        store16::<2>(ip, length);
        store16::<4>(ip, 0);
        store16::<6>(ip, fragment);
        store16::<8>(ip, ttl);
        store16::<10>(ip, !checksum::fold(sum));
        store32::<12>(ip, source);
        store32::<16>(ip, destination);
    }
}

impl Answer for V6 {
    // RFC 4443 sections 3.1 to 3.3.
    const PORT_UNREACHABLE: u16 = 0x0104;
    const TTL_EXCEEDED: u16 = 0x0300;
    const TOO_LONG: u16 = 0x0200;

    #[inline(always)]
    fn error<P: Packet>(packet: P, kind: u16, rest: u32) -> bool {
        // Also what is written once the packet has moved back.
        packet.reach((ETHERNET + IP6 + ICMP + QUOTED6_WORDS * 8) as u32);
        let (data, end) = (packet.data(), packet.end());
        let ip = data + ETHERNET;
        if ip + IP6 > end {
            return false;
        }
        unsafe {
            let macs = swapped(data);
            let client = [load64::<8>(ip), load64::<16>(ip)];
            let frontend = [load64::<24>(ip), load64::<32>(ip)];
            // Up to the ports: without them the sender's stack cannot tell whose packet it was.
            let Ok(walked) = extension::walk(ip, end) else { return false };
            let count = walked.offset as usize / 8 + 1;
            let length = ICMP + count * 8;
            if !packet.resize((ETHERNET + IP6 + length) as u32) {
                return false;
            }
            let (data, end) = (packet.data(), packet.end());
            let ip = data + ETHERNET;
            if ip + IP6 + ICMP > end {
                return false;
            }
            let mut sum = kind.to_be() as u64 + words(rest.to_be());
            sum += (length as u16).to_be() as u64 + (PROTOCOL_ICMP6 as u16).to_be() as u64;
            sum += wide_sum(client[0]) + wide_sum(client[1]) + wide_sum(frontend[0]) + wide_sum(frontend[1]);
            // The packet moves back in place, its last word first.
            for i in (0..QUOTED6_WORDS).rev() {
                let from = ip + i * 8;
                if i >= count {
                    continue;
                }
                if from + IP6 + ICMP + 8 > end {
                    return false;
                }
                let word = load64::<0>(from);
                sum += wide_sum(word);
                store64::<48>(from, word);
            }
            store_macs(data, macs);
            header6(ip, length as u16, PROTOCOL_ICMP6, frontend, client);
            let icmp = ip + IP6;
            store16::<0>(icmp, kind.to_be());
            store16::<2>(icmp, !checksum::fold(sum));
            store32::<4>(icmp, rest.to_be());
        }
        true
    }

    #[inline(always)]
    fn reset<P: Packet>(packet: P) -> bool {
        packet.reach((ETHERNET + extension::REACH + 20) as u32);
        let (data, end) = (packet.data(), packet.end());
        let ip = data + ETHERNET;
        if ip + IP6 > end {
            return false;
        }
        unsafe {
            let macs = swapped(data);
            let client = [load64::<8>(ip), load64::<16>(ip)];
            let frontend = [load64::<24>(ip), load64::<32>(ip)];
            let Ok(walked) = extension::walk(ip, end) else { return false };
            let l4 = opaque((ip + walked.offset as usize) as u64) as usize;
            if l4 + 20 > end {
                return false;
            }
            let (ports, sequence) = (load32::<0>(l4).rotate_left(16), load32::<8>(l4));
            if !packet.resize((ETHERNET + IP6 + 20) as u32) {
                return false;
            }
            let data = packet.data();
            let ip = data + ETHERNET;
            if ip + IP6 + 20 > packet.end() {
                return false;
            }
            store_macs(data, macs);
            header6(ip, 20, PROTOCOL_TCP as u8, frontend, client);
            let pseudo = wide_sum(client[0])
                + wide_sum(client[1])
                + wide_sum(frontend[0])
                + wide_sum(frontend[1])
                + 6u16.to_be() as u64
                + 20u16.to_be() as u64;
            segment(ip + IP6, ports, sequence, pseudo);
        }
        true
    }
}

#[inline(always)]
const fn wide_sum(word: u64) -> u64 {
    (word & 0xffff_ffff) + (word >> 32)
}

#[inline(always)]
unsafe fn header6(ip: usize, length: u16, protocol: u8, source: [u64; 2], destination: [u64; 2]) {
    unsafe {
        store32::<0>(ip, 0x6000_0000u32.to_be());
        store16::<4>(ip, length.to_be());
        store8::<6>(ip, protocol);
        store8::<7>(ip, TTL);
        store64::<8>(ip, source[0]);
        store64::<16>(ip, source[1]);
        store64::<24>(ip, destination[0]);
        store64::<32>(ip, destination[1]);
    }
}
