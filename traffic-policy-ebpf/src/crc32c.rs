//! The CRC32c of an SCTP packet (RFC 9260 appendix A), updated when the ports change.
//!
//! A CRC is linear: the difference (XOR) of the checksums of two packets of one length depends on
//! the difference of their bytes alone. Here only the ports differ, the first four bytes. As
//! polynomials over GF(2): the difference `d` of the ports begins a packet of `L` bytes, so the
//! checksums differ by `d · x^(8·L)` modulo the generator. Two tables give that power for any `L`:
//! one holds the factor of the low byte of `L`, the other that of the high byte.
//!
//! Polynomials are reflected, as in the algorithm: bit 31 is the coefficient of `x^0`.

/// The generator `0x1edc6f41`, reflected.
const GENERATOR: u32 = 0x82f6_3b78;
/// `x^0`.
const ONE: u32 = 1 << 31;

/// `x^(8·i)`, and `x^(8·256·i)`.
static BYTES: [u32; 256] = powers(shifted(ONE, 8));
static PAGES: [u32; 256] = powers(shifted(ONE, 8 * 256));

/// The product of `number` and `x^bits`.
const fn shifted(mut number: u32, bits: u32) -> u32 {
    let mut bit = 0;
    while bit < bits {
        number = times_x(number);
        bit += 1;
    }
    number
}

#[inline(always)]
const fn times_x(number: u32) -> u32 {
    number >> 1 ^ GENERATOR & 0u32.wrapping_sub(number & 1)
}

const fn powers(base: u32) -> [u32; 256] {
    let mut table = [ONE; 256];
    let mut index = 1;
    while index < table.len() {
        table[index] = multiply(table[index - 1], base);
        index += 1;
    }
    table
}

/// The product of two polynomials modulo the generator. It has no branch in its loop, because the
/// kernel's verifier would follow both branches in each iteration.
#[inline(always)]
const fn multiply(one: u32, other: u32) -> u32 {
    let (mut product, mut power) = (0, other);
    let mut bit = 0;
    while bit < 32 {
        product ^= power & 0u32.wrapping_sub(one >> (31 - bit) & 1);
        power = times_x(power);
        bit += 1;
    }
    product
}

/// The difference (XOR) of the checksum fields of two SCTP packets of `length` bytes, header
/// included, whose first four bytes differ by `difference`. Both differences are words in memory
/// order.
#[inline(always)]
pub fn difference(difference: u32, length: u16) -> u32 {
    let [page, byte] = length.to_be_bytes();
    let shift = multiply(PAGES[page as usize], BYTES[byte as usize]);
    multiply(u32::from_le(difference), shift).to_le()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The checksum field as RFC 9260 appendix A computes it, bit by bit, in memory order.
    fn full(packet: &[u8]) -> u32 {
        let mut crc = u32::MAX;
        for byte in packet {
            crc ^= u32::from(*byte);
            for _ in 0..8 {
                crc = crc >> 1 ^ if crc & 1 == 1 { GENERATOR } else { 0 };
            }
        }
        (!crc).to_le()
    }

    fn word(bytes: [u8; 4]) -> u32 {
        u32::from_ne_bytes(bytes)
    }

    /// The test vectors of RFC 3720 appendix B.4.
    #[test]
    fn the_reference_is_crc32c() {
        assert_eq!(full(&[0; 32]).to_le_bytes(), [0xaa, 0x36, 0x91, 0x8a]);
        assert_eq!(full(&[0xff; 32]).to_le_bytes(), [0x43, 0xab, 0xa8, 0x62]);
        let counted: Vec<u8> = (0..32).collect();
        assert_eq!(full(&counted).to_le_bytes(), [0x4e, 0x79, 0xdd, 0x46]);
    }

    fn check(mut packet: Vec<u8>, ports: [u8; 4]) {
        let (before, was) = (full(&packet), [packet[0], packet[1], packet[2], packet[3]]);
        packet[..4].copy_from_slice(&ports);
        let length = u16::try_from(packet.len()).unwrap();
        assert_eq!(before ^ difference(word(was) ^ word(ports), length), full(&packet), "{length} bytes");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(512))]

        #[test]
        fn by_the_difference_as_in_full(packet in proptest::collection::vec(any::<u8>(), 12..3000), ports: [u8; 4]) {
            check(packet, ports);
        }

        #[test]
        fn there_and_back(ports: u32, length in 12u16..) {
            let forth = difference(ports, length);
            prop_assert_eq!(forth == 0, ports == 0);
            prop_assert_eq!(difference(ports ^ u32::MAX, length), forth ^ difference(u32::MAX, length));
        }
    }

    /// Lengths at the boundaries of either table, and the longest.
    #[test]
    fn at_the_edges_of_the_tables() {
        for length in [4, 12, 255, 256, 257, 511, 512, 1480, 0x7fff, 0x8000, 0xff00, 0xffff] {
            check((0..length).map(|at: u32| (at * 7 % 251) as u8).collect(), [0x12, 0x34, 0xab, 0xcd]);
        }
    }
}
