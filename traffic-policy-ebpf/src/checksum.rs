//! The Internet checksum, updated by differences (RFC 1071, RFC 1624).
//!
//! One's complement sums may be computed in either byte order as long as all words are taken the
//! same way (RFC 1071 section 2 (B)), so everything here works on words as they lie in memory.
//!
//! A *delta* is the sum of the new words plus the sum of the complements of the old ones, folded to
//! 16 bits. Deltas of disjoint fields add up.

use crate::abi::Ports;

/// Folds a sum of 16-bit (or 32-bit) words to 16 bits with end-around carry.
#[inline(always)]
pub const fn fold(sum: u64) -> u16 {
    let sum = (sum & 0xffff_ffff) + (sum >> 32);
    let sum = (sum & 0xffff) + ((sum >> 16) & 0xffff) + (sum >> 32);
    let sum = (sum & 0xffff) + (sum >> 16);
    let sum = (sum & 0xffff) + (sum >> 16);
    sum as u16
}

/// The delta of replacing words that sum up to `old` by words that sum up to `new`; neither needs
/// to be folded.
#[inline(always)]
pub const fn delta(old: u64, new: u64) -> u16 {
    fold((!fold(old)) as u64 + fold(new) as u64)
}

/// Adds two deltas.
#[inline(always)]
pub const fn add(a: u16, b: u16) -> u16 {
    let sum = a as u32 + b as u32;
    ((sum & 0xffff) + (sum >> 16)) as u16
}

/// The checksum field after a change by `delta` (RFC 1624 equation 3).
#[inline(always)]
pub const fn update(checksum: u16, delta: u16) -> u16 {
    !add(!checksum, delta)
}

/// Updates as [`update`] does, for UDP: 0 stays 0 (no checksum, RFC 768), a computed 0 is sent as
/// all ones.
#[inline(always)]
pub const fn update_udp(checksum: u16, delta: u16) -> u16 {
    if checksum == 0 {
        return 0;
    }
    match update(checksum, delta) {
        0 => 0xffff,
        updated => updated,
    }
}

/// The delta of one decrement of the TTL. The TTL is the first byte of its word, so in memory order
/// the word loses 1 on little endian machines and 0x100 on big endian ones.
pub const TTL_STEP: u16 = !u16::from_ne_bytes([1, 0]);

/// The sum of the two words of a pair of ports.
#[inline(always)]
pub const fn port_sum(ports: Ports) -> u64 {
    word_sum(ports.wire())
}

/// The sum of the 16-bit words of a 32-bit word.
#[inline(always)]
pub const fn word_sum(word: u32) -> u64 {
    (word & 0xffff) as u64 + (word >> 16) as u64
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn sum(ports: u32) -> u64 {
        port_sum(Ports::from_wire(ports))
    }

    fn full(bytes: &[u8]) -> u16 {
        let mut sum = 0u64;
        for pair in bytes.chunks(2) {
            sum += u16::from_ne_bytes([pair[0], *pair.get(1).unwrap_or(&0)]) as u64;
        }
        !fold(sum)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4096))]

        #[test]
        fn incremental_equals_full(mut packet in proptest::collection::vec(any::<u8>(), 40..120), new in any::<[u8; 12]>(), at in 0usize..12) {
            let at = at * 2;
            packet[30] = 0;
            packet[31] = 0;
            prop_assume!(packet.iter().any(|b| *b != 0));
            let before = full(&packet);
            let words = |bytes: &[u8]| bytes.chunks(2).map(|p| u16::from_ne_bytes([p[0], p[1]]) as u64).sum::<u64>();
            // The field itself (30..32) is skipped by choosing the window around it.
            let at = if at + 12 > 30 { 32 } else { at };
            let end = (at + 12).min(packet.len() / 2 * 2);
            let old = words(&packet[at..end]);
            packet[at..end].copy_from_slice(&new[..end - at]);
            prop_assume!(packet.iter().any(|b| *b != 0));
            let d = delta(old, words(&packet[at..end]));
            // 0 and 0xffff are the same number in one's complement arithmetic.
            prop_assert_eq!(add(update(before, d), 0) % 0xffff, full(&packet) % 0xffff);
        }

        #[test]
        fn deltas_add_up(a in any::<u32>(), b in any::<u32>(), c in any::<u32>(), d in any::<u32>(), start in 1u16..) {
            let (d1, d2) = (delta(sum(a), sum(b)), delta(sum(c), sum(d)));
            prop_assert_eq!(update(update(start, d1), d2) % 0xffff, update(start, add(d1, d2)) % 0xffff);
        }

        #[test]
        fn there_and_back(a in any::<u32>(), b in any::<u32>(), start in 1u16..0xffff) {
            let (forth, back) = (delta(sum(a), sum(b)), delta(sum(b), sum(a)));
            prop_assert_eq!(update(update(start, forth), back), start);
        }

        #[test]
        fn ttl_step(ttl in 2u8.., protocol in any::<u8>(), rest in any::<[u8; 8]>()) {
            let mut header = [ttl, protocol, rest[0], rest[1], rest[2], rest[3], rest[4], rest[5]];
            let before = full(&header);
            header[0] -= 1;
            prop_assert_eq!(update(before, TTL_STEP) % 0xffff, full(&header) % 0xffff);
        }
    }

    #[test]
    fn udp_zero() {
        assert_eq!(update_udp(0, 0x1234), 0);
        let d = delta(0, 0x1234);
        assert_eq!(update(0x1234, d), 0);
        assert_eq!(update_udp(0x1234, d), 0xffff);
    }
}
