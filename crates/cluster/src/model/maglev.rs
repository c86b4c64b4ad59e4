//! Maglev tables: endpoints by slot, equal on every node that knows the same endpoints. Names,
//! hashes, sizes and weights are specified, with test vectors, in docs/maglev.md.
//!
//! Eisenbud et al., "Maglev: A Fast and Reliable Software Network Load Balancer" (NSDI 2016),
//! section 3.4. Weights are those of Katran's `MaglevHashV2`: shares follow them exactly.
//! <https://github.com/facebookincubator/katran/blob/main/katran/lib/MaglevHashV2.cpp>

use std::{fmt, net::SocketAddr, str::FromStr};

use siphasher::sip::SipHasher24;

use super::Protocol;

/// The annotation that sets the [`Algorithm`] of a Service.
pub const ALGORITHM_ANNOTATION: &str = "traffic-policy.io/algorithm";

/// The choice of the endpoint of a new connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Algorithm {
    #[default]
    Random,
    /// The endpoint follows from a table that is equal on every node.
    Maglev,
}

impl Algorithm {
    pub const ALL: [Self; 2] = [Self::Random, Self::Maglev];

    /// The name in flags and annotations.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Random => "random",
            Self::Maglev => "maglev",
        }
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Algorithm {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|algorithm| algorithm.name() == text);
        found.ok_or_else(|| format!("`{text}` is not an algorithm: write random or maglev"))
    }
}

/// The number of slots of a table: a prime, so that every permutation reaches each slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableSize(u32);

impl TableSize {
    /// The sizes that may be chosen, which are those of Cilium.
    pub const ALL: [u32; 10] = [251, 509, 1021, 2039, 4093, 8191, 16_381, 32_749, 65_521, 131_071];

    #[must_use]
    pub const fn slots(self) -> u32 {
        self.0
    }
}

impl Default for TableSize {
    fn default() -> Self {
        Self(16_381)
    }
}

impl fmt::Display for TableSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for TableSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let known = text.parse().ok().filter(|slots| Self::ALL.contains(slots));
        known.map(Self).ok_or_else(|| {
            let sizes = Self::ALL.map(|slots| slots.to_string()).join(", ");
            format!("`{text}` is not a size of Maglev tables: write one of {sizes}")
        })
    }
}

/// An endpoint of a table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    name: String,
    weight: u32,
}

impl Member {
    /// The weight of endpoints that have no other.
    pub const WEIGHT: u32 = 1;

    #[must_use]
    pub fn new(address: SocketAddr, protocol: Protocol, weight: u32) -> Self {
        Self { name: format!("{address}/{}", protocol.name().to_lowercase()), weight }
    }

    /// The name, on which the member's slots depend: `192.0.2.1:80/tcp`, `[2001:db8::1]:80/udp`.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The order in which this member tries the slots.
    #[must_use]
    pub fn permutation(&self, size: TableSize) -> Permutation {
        let hash = |key| SipHasher24::new_with_keys(0, key).hash(self.name.as_bytes());
        let slots = u64::from(size.0);
        // Both are less than the size.
        Permutation { offset: (hash(0) % slots) as u32, skip: (hash(1) % (slots - 1)) as u32 + 1 }
    }
}

/// The slots in the order in which a member tries them: `offset + n × skip`, modulo the size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Permutation {
    pub offset: u32,
    pub skip: u32,
}

/// The largest number of members of a table: larger positions are not representable.
const MOST_MEMBERS: usize = FREE as usize;

/// A slot that no member has taken yet.
const FREE: u16 = u16::MAX;

/// Returns the table of these members: the position among `members` for each slot. The order of
/// `members` does not matter. `None` if there are none with a weight, or more than slots or than
/// `MOST_MEMBERS`.
#[must_use]
pub fn table(members: &[Member], size: TableSize) -> Option<Vec<u16>> {
    if members.len() > MOST_MEMBERS.min(size.0 as usize) {
        return None;
    }
    let mut order: Vec<u16> =
        (0..members.len() as u16).filter(|at| members[usize::from(*at)].weight > 0).collect();
    order.sort_by(|a, b| members[usize::from(*a)].name.cmp(&members[usize::from(*b)].name));
    let mut turns: Vec<Turn> = order
        .into_iter()
        .map(|position| {
            let member = &members[usize::from(position)];
            let Permutation { offset, skip } = member.permutation(size);
            Turn { position, next: offset, skip, weight: member.weight.into(), saved: 0 }
        })
        .collect();
    (!turns.is_empty()).then(|| populate(&mut turns, size.0))
}

/// Returns a check word of the table of these members, in this order: equal only if [`table`] is.
#[must_use]
pub fn digest(members: &[Member], size: TableSize) -> u32 {
    let mut text = Vec::with_capacity(members.len() * 32 + 4);
    for member in members {
        text.extend_from_slice(member.name.as_bytes());
        // No name contains a zero.
        text.push(0);
        text.extend_from_slice(&member.weight.to_le_bytes());
    }
    text.extend_from_slice(&size.0.to_le_bytes());
    SipHasher24::new().hash(&text) as u32
}

/// The state of a member while a table is filled.
#[derive(Clone, Copy, Debug)]
struct Turn {
    position: u16,
    /// The slot that it tries next.
    next: u32,
    skip: u32,
    weight: u64,
    /// The weight that it has saved up since it last took a slot.
    saved: u64,
}

/// Fills a table of a prime number of slots. In each round every member saves its weight; one that
/// has saved as much as the largest weight spends that, and takes its next free slot.
fn populate(turns: &mut [Turn], slots: u32) -> Vec<u16> {
    let mut table = vec![FREE; slots as usize];
    let mut free = slots;
    let largest = turns.iter().map(|turn| turn.weight).max().unwrap_or_default();
    while free > 0 {
        for turn in &mut *turns {
            turn.saved += turn.weight;
            if turn.saved < largest {
                continue;
            }
            turn.saved -= largest;
            while table[turn.next as usize] != FREE {
                turn.advance(slots);
            }
            table[turn.next as usize] = turn.position;
            turn.advance(slots);
            free -= 1;
            if free == 0 {
                break;
            }
        }
    }
    table
}

impl Turn {
    fn advance(&mut self, slots: u32) {
        // Without a division, and without a branch, which no processor could predict: a difference
        // below zero is a large number. The sum of two numbers below 131,071 fits.
        let next = self.next + self.skip;
        self.next = next.min(next.wrapping_sub(slots));
    }
}

#[cfg(test)]
mod tests;
