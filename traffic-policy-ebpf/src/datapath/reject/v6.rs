//! ICMPv6 errors and RSTs of IPv6: port unreachable, time exceeded, packet too big.

use core::ptr;

use aya_ebpf::helpers::bpf_csum_diff;
use traffic_policy_ebpf::{
    abi::{Address as _, Address6, PROTOCOL_TCP, Piece, Ports},
    checksum::{self, word_sum},
};

use super::{Answer, ICMP, TTL, segment, store_macs, swapped};

use crate::datapath::{
    barrier::opaque,
    ctx::{Packet, Skb as _},
    family::V6,
    maps::PIECE,
    parse::{ETHERNET, Parse as _, ipv6_ext},
    words::{load32, load64, store8, store16, store32, store64},
};

const IP6: usize = 40;
/// The largest IPv6 header with its extension headers, and the eight bytes after it that an error
/// quotes, in words.
const QUOTED6_WORDS: usize = (ipv6_ext::MAX_LENGTH + 8) / 8;
const QUOTED6_MASK: usize = QUOTED6_WORDS.next_power_of_two() - 1;
/// A mask for the bytes of a quote less one, for the verifier.
const MOST_QUOTED: u32 = (QUOTED6_MASK * 8) as u32 | 7;
const PROTOCOL_ICMP6: u8 = 58;

impl Answer for V6 {
    // RFC 4443 sections 3.1 to 3.3.
    const PORT_UNREACHABLE: u16 = 0x0104;
    const TTL_EXCEEDED: u16 = 0x0300;
    const TOO_LONG: u16 = 0x0200;

    #[inline(always)]
    fn error<P: Packet>(packet: P, kind: u16, rest: u32, inside: u32, opened: bool) -> bool {
        // The pull includes the bytes that are written once the packet has been moved back.
        packet.pull((ETHERNET + IP6 + ICMP + QUOTED6_WORDS * 8) as u32);
        let (data, end) = (packet.data(), packet.end());
        let ip = data + ETHERNET;
        if ip + IP6 > end {
            return false;
        }
        let macs = swapped(data);
        let (client, frontend) = Self::addresses_at(ip);
        // The quote extends to the ports: without them the sender's stack cannot identify the
        // socket.
        let headers = if inside == 0 {
            let Ok(walked) = ipv6_ext::walk(packet, ETHERNET) else { return false };
            walked.offset as usize
        } else {
            IP6 + inside as usize
        };
        let count = headers / 8 + 1;
        let length = ICMP + count * 8;
        let mut sum = kind.to_be() as u64 + word_sum(rest.to_be());
        sum += (length as u16).to_be() as u64 + (PROTOCOL_ICMP6 as u16).to_be() as u64;
        sum += client.sum() + frontend.sum();
        if let Some(skb) = packet.skb() {
            // Not moved in place: the kernel may give the frame its length at its head.
            let Some(piece) = PIECE.get_ptr_mut(0) else { return false };
            let quoted = (opaque((count * 8 - 1) as u64) as u32 & MOST_QUOTED) + 1;
            if !skb.copy_out(ETHERNET as u32, piece, quoted)
                || !packet.renew((ETHERNET + IP6 + length) as u32, opened)
                || !skb.copy_in((ETHERNET + IP6 + ICMP) as u32, piece, quoted)
            {
                return false;
            }
            sum += sum_of(piece, quoted);
        } else if !move_back::<P>(packet, count, &mut sum) {
            return false;
        }
        let (data, end) = (packet.data(), packet.end());
        let ip = data + ETHERNET;
        if ip + IP6 + ICMP > end {
            return false;
        }
        store_macs(data, macs);
        header6(ip, length as u16, PROTOCOL_ICMP6, frontend, client);
        let icmp = ip + IP6;
        store16::<0>(icmp, kind.to_be());
        store16::<2>(icmp, !checksum::fold(sum));
        store32::<4>(icmp, rest.to_be());
        true
    }

    #[inline(always)]
    fn reset<P: Packet>(packet: P, opened: bool) -> bool {
        packet.pull((ETHERNET + ipv6_ext::MAX_LENGTH + 20) as u32);
        let (data, end) = (packet.data(), packet.end());
        let ip = data + ETHERNET;
        if ip + IP6 > end {
            return false;
        }
        let macs = swapped(data);
        let (client, frontend) = Self::addresses_at(ip);
        let Ok(walked) = ipv6_ext::walk(packet, ETHERNET) else { return false };
        let l4 = opaque((ip + walked.offset as usize) as u64) as usize;
        if l4 + 20 > end {
            return false;
        }
        let (ports, sequence) = (Ports::from_wire(load32::<0>(l4)).reversed(), load32::<8>(l4));
        if !packet.renew((ETHERNET + IP6 + 20) as u32, opened) {
            return false;
        }
        let data = packet.data();
        let ip = data + ETHERNET;
        if ip + IP6 + 20 > packet.end() {
            return false;
        }
        store_macs(data, macs);
        header6(ip, 20, PROTOCOL_TCP as u8, frontend, client);
        let pseudo = client.sum() + frontend.sum() + 6u16.to_be() as u64 + 20u16.to_be() as u64;
        segment(ip + IP6, ports, sequence, pseudo);
        true
    }
}

/// Extends the frame to an error that quotes `count` times eight bytes, and moves these back in
/// place, behind the new headers. Adds the sum of their words.
#[inline(always)]
fn move_back<P: Packet>(packet: P, count: usize, sum: &mut u64) -> bool {
    if !packet.resize((ETHERNET + IP6 + ICMP + count * 8) as u32) {
        return false;
    }
    let (ip, end) = (packet.data() + ETHERNET, packet.end());
    // Last word first. One pointer is moved down: with a separate offset for each word the verifier
    // would follow each possible length to the end.
    let mut left = count;
    for _ in 0..QUOTED6_WORDS {
        if left == 0 {
            break;
        }
        left -= 1;
        let from = ip + (opaque(left as u64) as usize & QUOTED6_MASK) * 8;
        if from + IP6 + ICMP + 8 > end {
            return false;
        }
        let word = load64::<0>(from);
        *sum += wide_sum(word);
        store64::<48>(from, word);
    }
    true
}

/// The sum of the words of `length` bytes, a multiple of four.
#[inline(always)]
fn sum_of(piece: *mut Piece, length: u32) -> u64 {
    // SAFETY: a helper of the kernel: the verifier checks its arguments.
    unsafe { bpf_csum_diff(ptr::null_mut(), 0, piece.cast(), length, 0) as u32 as u64 }
}

#[inline(always)]
const fn wide_sum(word: u64) -> u64 {
    (word & 0xffff_ffff) + (word >> 32)
}

#[inline(always)]
fn header6(ip: usize, length: u16, protocol: u8, source: Address6, destination: Address6) {
    let (source, destination) = (source.wire(), destination.wire());
    store32::<0>(ip, 0x6000_0000u32.to_be());
    store16::<4>(ip, length.to_be());
    store8::<6>(ip, protocol);
    store8::<7>(ip, TTL);
    store64::<8>(ip, source[0]);
    store64::<16>(ip, source[1]);
    store64::<24>(ip, destination[0]);
    store64::<32>(ip, destination[1]);
}
