//! Elements of `tp_maglev`: each packs the places in a list of four slots of a table, because an
//! element of an array takes eight bytes in any case.

/// The number of slots in an element.
pub const SLOTS_PER_ELEMENT: u32 = 4;

/// The most former owners of a slot that are kept: each has a table of its own.
pub const FORMER: u32 = 3;

/// The place of a slot without a former owner: beyond every list.
pub const NOBODY: u16 = u16::MAX;

/// Returns the number of elements of a table with this many slots.
#[inline(always)]
#[must_use]
pub const fn elements(slots: u32) -> u32 {
    slots.div_ceil(SLOTS_PER_ELEMENT)
}

/// Returns the number of the element that holds a slot, within its table.
#[inline(always)]
#[must_use]
pub const fn element_of(slot: u32) -> u32 {
    slot / SLOTS_PER_ELEMENT
}

/// Returns the place that an element holds for a slot.
#[inline(always)]
#[must_use]
pub const fn place(element: u64, slot: u32) -> u32 {
    (element >> (slot % SLOTS_PER_ELEMENT * 16)) as u32 & 0xffff
}

/// Packs the places of a whole table into elements.
#[cfg(not(target_arch = "bpf"))]
pub fn pack(places: &[u16]) -> impl Iterator<Item = u64> + '_ {
    let word = |four: &[u16]| match *four {
        [a, b, c, d] => u64::from(a) | u64::from(b) << 16 | u64::from(c) << 32 | u64::from(d) << 48,
        _ => four.iter().rev().fold(0, |word, place| word << 16 | u64::from(*place)),
    };
    places.chunks(SLOTS_PER_ELEMENT as usize).map(word)
}

/// Returns the places of a whole table of `slots` slots.
#[cfg(not(target_arch = "bpf"))]
pub fn unpack(elements: &[u64], slots: u32) -> impl Iterator<Item = u16> + '_ {
    (0..slots).map(|slot| place(elements[element_of(slot) as usize], slot) as u16)
}

#[cfg(test)]
mod tests {
    extern crate std;

    use std::vec::Vec;

    use super::*;

    #[test]
    fn every_slot_is_found_again() {
        let places: Vec<u16> = (0..251).map(|slot| slot * 261).collect();
        let words: Vec<u64> = pack(&places).collect();
        assert_eq!(words.len(), elements(251) as usize);
        for (slot, wanted) in (0..).zip(&places) {
            assert_eq!(place(words[element_of(slot) as usize], slot), u32::from(*wanted));
        }
        assert_eq!(unpack(&words, 251).collect::<Vec<_>>(), places);
    }
}
