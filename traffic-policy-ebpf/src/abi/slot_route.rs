//! Routes of endpoints, one for each slot.

use super::Address;
use crate::hash;

/// The hop index that stands for "this node's stack delivers it".
pub const HOP_LOCAL: u16 = 0xffff;

/// The route to an endpoint: found by the first new flow to a slot, used by the later ones.
///
/// It consists of several words that other CPUs may read while they are written, in any order that
/// compiler and CPU choose. A reader takes a copy and uses it only if [`Self::is_whole`].
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct SlotRoute<A> {
    /// The address of this node that the kernel would use towards the endpoint.
    pub source: A,
    /// The route epoch in the upper half, the hop index in the lower; 0 = not resolved.
    pub word: u32,
    /// A hash of the other two fields.
    pub check: u32,
}

impl<A: Address> SlotRoute<A> {
    #[inline(always)]
    #[must_use]
    pub fn new(source: A, epoch: u16, hop: u16) -> Self {
        let word = (epoch as u32) << 16 | hop as u32;
        Self { source, word, check: hash::check(source, word) }
    }

    /// Whether the words were written together. Words of two writers pass as whole once in 2^32.
    #[inline(always)]
    pub fn is_whole(&self) -> bool {
        self.check == hash::check(self.source, self.word)
    }

    /// Returns the route epoch, never 0, and the hop index that belong together; `None` if nothing
    /// is stored, or the words do not belong together.
    #[inline(always)]
    pub fn route(&self) -> Option<(u16, u16)> {
        let (epoch, hop) = ((self.word >> 16) as u16, self.word as u16);
        if epoch != 0 && self.is_whole() { Some((epoch, hop)) } else { None }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::abi::{Address4, Address6};

    #[test]
    fn an_empty_one_says_nothing() {
        assert_eq!(SlotRoute::<Address4>::default().route(), None);
        assert_eq!(SlotRoute::<Address6>::default().route(), None);
    }

    /// Checks all values that a reader may see while one route is written over another: each word
    /// of either, whatever the order of loads and stores. As in use, the addresses belong to one
    /// node, and the numbers are similar.
    fn mixtures<A: Address + std::fmt::Debug>(sources: &[A]) {
        let ways = [(1, 1), (1, 2), (2, 1), (2, 2), (3, 1), (257, 1), (1, HOP_LOCAL), (u16::MAX, 7)];
        let routes: Vec<SlotRoute<A>> = sources
            .iter()
            .flat_map(|source| ways.map(|(epoch, hop)| SlotRoute::new(*source, epoch, hop)))
            .collect();
        for one in &routes {
            assert_eq!(one.route(), Some(((one.word >> 16) as u16, one.word as u16)));
            for other in &routes {
                for bits in 0..8 {
                    let [source, word, check] =
                        [1, 2, 4].map(|bit| if bits & bit == 0 { one } else { other });
                    let seen = SlotRoute { source: source.source, word: word.word, check: check.check };
                    assert!(
                        seen.route().is_none() || seen == *one || seen == *other,
                        "{one:?} {other:?} {seen:?}"
                    );
                }
            }
        }
    }

    #[test]
    fn no_mixture_of_two_passes() {
        mixtures(
            &[0, 1, 2, 0x0a00_00c0, 0x0b00_00c0, 0x0a00_12ac, 0x0a01_12ac, u32::MAX].map(Address4::from_wire),
        );
        let node = 0x0db8_0120_u64;
        mixtures(
            &[[0, 0], [node, 0], [node, 1 << 56], [node, 2 << 56], [node, 3 << 56], [node + 1, 1]]
                .map(Address6::from_wire),
        );
    }

    proptest! {
        #[test]
        fn no_mixture_of_any_two_passes(a in any::<[u64; 2]>(), b in any::<[u64; 2]>()) {
            mixtures(&[a, b].map(Address6::from_wire));
            mixtures(&[a[0], b[0]].map(|word| Address4::from_wire(word as u32)));
        }
    }
}
