//! Addresses as they lie in a packet, and how two of them become part of a flow key.

/// Odd, so that no bit of a destination is lost. Not secret: who is told apart is seen by what the entry keeps.
const MULTIPLIERS: [u64; 2] = [0x9e37_79b9_7f4a_7c15, 0xbf58_476d_1ce4_e5b9];

/// An address as it lies in a packet.
pub trait Address: Fold + Copy + PartialEq + Default + 'static {
    /// Sum of its 16-bit words, not folded.
    fn sum(self) -> u64;
    /// Its first eight bytes and its last eight, zero filled: the form of [`HopKey`][super::HopKey].
    fn wide(self) -> [u64; 2];
    /// Both words mixed into one word.
    fn mixed(self) -> u64;
}

/// An IPv4 address in memory order.
pub type Address4 = u32;
/// An IPv6 address in memory order.
pub type Address6 = [u64; 2];

impl Address for Address4 {
    #[inline(always)]
    fn sum(self) -> u64 {
        (self & 0xffff) as u64 + (self >> 16) as u64
    }
    #[inline(always)]
    fn wide(self) -> [u64; 2] {
        [self as u64, 0]
    }
    #[inline(always)]
    fn mixed(self) -> u64 {
        self as u64
    }
}

impl Address for Address6 {
    #[inline(always)]
    fn sum(self) -> u64 {
        let [a, b] = self;
        (a & 0xffff_ffff) + (a >> 32) + (b & 0xffff_ffff) + (b >> 32)
    }
    #[inline(always)]
    fn wide(self) -> [u64; 2] {
        self
    }
    #[inline(always)]
    fn mixed(self) -> u64 {
        self[0] ^ self[1].rotate_left(29)
    }
}

/// How two addresses become part of a key.
pub trait Fold: Sized {
    /// Both addresses in a key.
    type Folded: Copy + PartialEq + Eq + core::fmt::Debug + core::hash::Hash + Default + 'static;
    /// What the key does not tell, in the entry.
    type Kept: Copy + PartialEq + Eq + core::fmt::Debug + Default + 'static;

    fn fold(source: Self, destination: Self) -> Self::Folded;
    /// What an entry keeps of its destination.
    fn kept(self) -> Self::Kept;
    /// Source and destination.
    fn unfold(folded: Self::Folded, kept: Self::Kept) -> (Self, Self);
}

impl Fold for Address4 {
    type Folded = [Self; 2];
    type Kept = [u64; 0];

    #[inline(always)]
    fn fold(source: Self, destination: Self) -> [Self; 2] {
        [source, destination]
    }
    #[inline(always)]
    fn kept(self) -> [u64; 0] {
        []
    }
    #[inline(always)]
    fn unfold([source, destination]: [Self; 2], _: [u64; 0]) -> (Self, Self) {
        (source, destination)
    }
}

impl Fold for Address6 {
    type Folded = [u64; 2];
    type Kept = [u64; 2];

    #[inline(always)]
    fn fold(source: Self, destination: Self) -> [u64; 2] {
        [
            source[0] ^ destination[0].wrapping_mul(MULTIPLIERS[0]),
            source[1] ^ destination[1].wrapping_mul(MULTIPLIERS[1]),
        ]
    }
    #[inline(always)]
    fn kept(self) -> [u64; 2] {
        self
    }
    #[inline(always)]
    fn unfold(folded: [u64; 2], kept: [u64; 2]) -> (Self, Self) {
        (Self::fold(folded, kept), kept)
    }
}
