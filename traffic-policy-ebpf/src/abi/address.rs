//! Addresses in network byte order, as they lie in a packet, and the folding of two addresses into
//! a flow key.

use core::mem::{align_of, size_of};

/// The multipliers of the halves of an IPv6 destination: odd, so that no bit is lost, and secret.
/// An attacker that knew them could send packets from one prefix to one destination whose keys
/// collide with those of other sources' packets to another destination, and hold their ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Multipliers(pub [u64; 2]);

impl Multipliers {
    /// The multipliers of programs that were loaded without a seed: tests and benches, whose tables
    /// have no other user.
    pub const UNSEEDED: Self = Self::of(0);

    /// Derives the multipliers from the seed of the hash. That seed is pinned, so programs of a
    /// later agent find the flows of an earlier one.
    #[must_use]
    pub const fn of(seed: u64) -> Self {
        Self([splitmix64(seed, 1) | 1, splitmix64(seed, 2) | 1])
    }
}

/// Returns the number `place` steps after the seed (Steele, Lea and Flood, "Fast splittable
/// pseudorandom number generators", 2014).
const fn splitmix64(seed: u64, place: u64) -> u64 {
    let z = seed.wrapping_add(place.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// An address as it lies in a packet.
pub trait Address: Fold + Copy + PartialEq + Default + 'static {
    /// The sum of its 16-bit words, not folded.
    fn sum(self) -> u64;
    /// The form in maps that serve both families.
    fn wide(self) -> WideAddress;
    /// Both words mixed into one word.
    fn mixed(self) -> u64;
    /// Whether it lies in a network that no packet may have as its source.
    fn is_no_source(self) -> bool;
}

/// An IPv4 address in network byte order. It does not convert to or from a number implicitly.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct Address4(u32);

/// An IPv6 address in network byte order, its first eight bytes and its last eight.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct Address6([u64; 2]);

/// An address of either family in network byte order, in maps that serve both: an IPv6 address as
/// its first eight bytes and its last eight, an IPv4 address as its four bytes, zero filled. A
/// field next to it tells the family.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct WideAddress([u64; 2]);

impl WideAddress {
    /// The unspecified address, 0.0.0.0 or ::, which means "not known".
    pub const UNSPECIFIED: Self = Self([0, 0]);

    /// Takes the address from two words that have been loaded as they lie: see
    /// [`Address6::from_wire`].
    #[inline(always)]
    #[must_use]
    pub const fn from_wire(words: [u64; 2]) -> Self {
        Self(words)
    }

    /// The words to store.
    #[inline(always)]
    #[must_use]
    pub const fn wire(self) -> [u64; 2] {
        self.0
    }

    /// The address, read as IPv4.
    #[inline(always)]
    #[must_use]
    pub const fn ipv4(self) -> Address4 {
        Address4(self.0[0] as u32)
    }

    /// The address, read as IPv6.
    #[inline(always)]
    #[must_use]
    pub const fn ipv6(self) -> Address6 {
        Address6(self.0)
    }
}

impl Address4 {
    /// The unspecified address 0.0.0.0, which means "not known".
    pub const UNSPECIFIED: Self = Self(0);

    /// Takes the address from a word that was loaded from a packet, or from a structure of the
    /// kernel in the same order.
    #[inline(always)]
    #[must_use]
    pub const fn from_wire(word: u32) -> Self {
        Self(word)
    }

    /// The word to store.
    #[inline(always)]
    #[must_use]
    pub const fn wire(self) -> u32 {
        self.0
    }

    #[inline(always)]
    #[must_use]
    pub const fn from_octets(octets: [u8; 4]) -> Self {
        Self(u32::from_ne_bytes(octets))
    }

    #[inline(always)]
    #[must_use]
    pub const fn octets(self) -> [u8; 4] {
        self.0.to_ne_bytes()
    }
}

impl Address6 {
    /// The unspecified address ::, which means "not known".
    pub const UNSPECIFIED: Self = Self([0, 0]);

    /// Takes the address from two words that were loaded from a packet: see
    /// [`Address4::from_wire`].
    #[inline(always)]
    #[must_use]
    pub const fn from_wire(words: [u64; 2]) -> Self {
        Self(words)
    }

    /// The words to store.
    #[inline(always)]
    #[must_use]
    pub const fn wire(self) -> [u64; 2] {
        self.0
    }

    #[must_use]
    pub const fn from_octets(octets: [u8; 16]) -> Self {
        let [a, b, c, d, e, f, g, h, rest @ ..] = octets;
        Self([u64::from_ne_bytes([a, b, c, d, e, f, g, h]), u64::from_ne_bytes(rest)])
    }

    #[must_use]
    pub const fn octets(self) -> [u8; 16] {
        let [[a, b, c, d, e, f, g, h], [i, j, k, l, m, n, o, p]] =
            [self.0[0].to_ne_bytes(), self.0[1].to_ne_bytes()];
        [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p]
    }
}

impl Address for Address4 {
    #[inline(always)]
    fn sum(self) -> u64 {
        (self.0 & 0xffff) as u64 + (self.0 >> 16) as u64
    }
    #[inline(always)]
    fn wide(self) -> WideAddress {
        WideAddress([self.0 as u64, 0])
    }
    #[inline(always)]
    fn mixed(self) -> u64 {
        self.0 as u64
    }
    /// RFC 1122 section 3.2.1.3: 0/8 (this network), 127/8 (loopback), 224/4 (multicast), 240/4
    /// (reserved, broadcast).
    #[inline(always)]
    fn is_no_source(self) -> bool {
        let [first, ..] = self.0.to_ne_bytes();
        first == 0 || first == 127 || first >= 224
    }
}

impl Address for Address6 {
    #[inline(always)]
    fn sum(self) -> u64 {
        let [a, b] = self.0;
        (a & 0xffff_ffff) + (a >> 32) + (b & 0xffff_ffff) + (b >> 32)
    }
    #[inline(always)]
    fn wide(self) -> WideAddress {
        WideAddress(self.0)
    }
    #[inline(always)]
    fn mixed(self) -> u64 {
        self.0[0] ^ self.0[1].rotate_left(29)
    }
    /// RFC 4291 sections 2.5.2, 2.5.3 and 2.7: unspecified, loopback, multicast.
    #[inline(always)]
    fn is_no_source(self) -> bool {
        let [head, tail] = self.0;
        head == 0 && u64::from_be(tail) <= 1 || head.to_ne_bytes()[0] == 0xff
    }
}

/// The packing of two addresses into a key.
pub trait Fold: Sized {
    /// The form that both addresses take in a key.
    type Folded: Copy + PartialEq + Eq + core::fmt::Debug + core::hash::Hash + Default + 'static;
    /// The bits of the destination that the key omits; they are stored in the entry.
    type Kept: Copy + PartialEq + Eq + core::fmt::Debug + Default + 'static;

    fn fold(source: Self, destination: Self, by: Multipliers) -> Self::Folded;
    /// The bits of this destination that are stored in the entry.
    fn kept(self) -> Self::Kept;
    /// Returns source and destination.
    fn unfold(folded: Self::Folded, kept: Self::Kept, by: Multipliers) -> (Self, Self);
}

impl Fold for Address4 {
    type Folded = [Self; 2];
    type Kept = [u64; 0];

    #[inline(always)]
    fn fold(source: Self, destination: Self, _: Multipliers) -> [Self; 2] {
        [source, destination]
    }
    #[inline(always)]
    fn kept(self) -> [u64; 0] {
        []
    }
    #[inline(always)]
    fn unfold([source, destination]: [Self; 2], _: [u64; 0], _: Multipliers) -> (Self, Self) {
        (source, destination)
    }
}

impl Fold for Address6 {
    type Folded = [u64; 2];
    type Kept = [u64; 2];

    #[inline(always)]
    fn fold(source: Self, destination: Self, by: Multipliers) -> [u64; 2] {
        [
            source.0[0] ^ destination.0[0].wrapping_mul(by.0[0]),
            source.0[1] ^ destination.0[1].wrapping_mul(by.0[1]),
        ]
    }
    #[inline(always)]
    fn kept(self) -> [u64; 2] {
        self.0
    }
    #[inline(always)]
    fn unfold(folded: [u64; 2], kept: [u64; 2], by: Multipliers) -> (Self, Self) {
        (Self(Self::fold(Self(folded), Self(kept), by)), Self(kept))
    }
}

const _: () = {
    assert!(size_of::<Address4>() == 4 && align_of::<Address4>() == 4);
    assert!(size_of::<Address6>() == 16 && align_of::<Address6>() == 8);
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_lie_as_in_a_packet() {
        let v4 = Address4::from_octets([192, 0, 2, 1]);
        assert_eq!((v4.wire().to_ne_bytes(), v4.octets()), ([192, 0, 2, 1], [192, 0, 2, 1]));
        let octets = [0x20, 1, 0xd, 0xb8, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12];
        let v6 = Address6::from_octets(octets);
        assert_eq!(v6.octets(), octets);
        assert_eq!(v6.wire()[1].to_ne_bytes(), [5, 6, 7, 8, 9, 10, 11, 12]);
    }
}
