//! ICMP errors and RSTs of IPv4: port unreachable, time exceeded, fragmentation needed.

use traffic_policy_ebpf::{
    abi::{Address as _, Address4, PROTOCOL_TCP, Ports},
    checksum::{self, word_sum},
};

use super::{Answer, ICMP, TTL, segment, store_macs, swapped};

use crate::datapath::{
    ctx::Packet,
    family::{Family as _, V4},
    parse::{ETHERNET, Parse as _},
    value::{load_once, store},
    words::{load8, load32, store16, store32},
};

const IP4: usize = 20;
/// The largest IPv4 header, and the eight bytes after it that an error quotes (RFC 792), in words.
const QUOTED4_WORDS: usize = (60 + 8) / 4;

impl Answer for V4 {
    // RFC 792; RFC 1191 section 4 for the MTU in the last word.
    const PORT_UNREACHABLE: u16 = 0x0303;
    const TTL_EXCEEDED: u16 = 0x0b00;
    const TOO_LONG: u16 = 0x0304;

    #[inline(always)]
    fn error<P: Packet>(packet: P, kind: u16, rest: u32, inside: u32, opened: bool) -> bool {
        let data = packet.data();
        let ip = data + ETHERNET;
        if ip + IP4 > packet.end() {
            return false;
        }
        let macs = swapped(data);
        let (client, frontend) = Self::addresses_at(ip);
        let Some(scratch) = Self::scratch() else { return false };
        let words = place!(mut scratch.quoted_words);
        let count = (load8::<0>(ip) as usize & 15) + 2 + inside as usize / 4;
        store(words, count as u32);
        let mut quoted = [0u32; QUOTED4_WORDS];
        let mut sum = kind.to_be() as u64 + word_sum(rest.to_be());
        for (i, word) in quoted.iter_mut().enumerate() {
            let at = ip + i * 4;
            if i >= count || at + 4 > packet.end() {
                break;
            }
            *word = load32::<0>(at);
            sum += word_sum(*word);
        }
        let length = IP4 + ICMP + count * 4;
        if !packet.renew((ETHERNET + length) as u32, opened) {
            return false;
        }
        let data = packet.data();
        let ip = data + ETHERNET;
        if ip + IP4 + ICMP > packet.end() {
            return false;
        }
        store_macs(data, macs);
        header4(ip, length as u32, 1, frontend, client);
        // Read back, so that the verifier knows no bounds for it, and walks the second loop once
        // for all exits of the first.
        let count = load_once(words) as usize;
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
        true
    }

    #[inline(always)]
    fn reset<P: Packet>(packet: P, opened: bool) -> bool {
        let data = packet.data();
        let ip = data + ETHERNET;
        if ip + IP4 > packet.end() {
            return false;
        }
        let macs = swapped(data);
        let (client, frontend) = Self::addresses_at(ip);
        let l4 = ip + ((load8::<0>(ip) as usize & 15) << 2);
        if l4 + 20 > packet.end() {
            return false;
        }
        let (ports, sequence) = (Ports::from_wire(load32::<0>(l4)).reversed(), load32::<8>(l4));
        if !packet.renew((ETHERNET + IP4 + 20) as u32, opened) {
            return false;
        }
        let data = packet.data();
        let ip = data + ETHERNET;
        if ip + IP4 + 20 > packet.end() {
            return false;
        }
        store_macs(data, macs);
        header4(ip, (IP4 + 20) as u32, PROTOCOL_TCP as u8, frontend, client);
        let pseudo = client.sum() + frontend.sum() + 6u16.to_be() as u64 + 20u16.to_be() as u64;
        segment(ip + IP4, ports, sequence, pseudo);
        true
    }
}

#[inline(always)]
fn header4(ip: usize, length: u32, protocol: u8, source: Address4, destination: Address4) {
    // Version 4, five words; length; DF; TTL and protocol, each pair as one word in memory order.
    let (first, length) = (0x4500u16.to_be(), (length as u16).to_be());
    let (fragment, ttl) = (0x4000u16.to_be(), u16::from_be_bytes([TTL, protocol]).to_be());
    let sum = first as u64 + length as u64 + fragment as u64 + ttl as u64 + source.sum() + destination.sum();
    store16::<0>(ip, first);
    store16::<2>(ip, length);
    store16::<4>(ip, 0);
    store16::<6>(ip, fragment);
    store16::<8>(ip, ttl);
    store16::<10>(ip, !checksum::fold(sum));
    store32::<12>(ip, source.wire());
    store32::<16>(ip, destination.wire());
}
