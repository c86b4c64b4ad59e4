//! Keys of the flow tables.
//!
//! The kernel hashes and compares every byte of a key, and beyond 24 bytes an established packet
//! becomes measurably slower. So the two IPv6 addresses of a packet are folded into the size of
//! one, and the entry keeps the destination: key and destination together give the source back, so
//! no packet ever gets another flow's translation. A packet whose key is taken by a flow to another
//! destination has no flow and gets none. By chance that happens to one in 2^64, and the
//! multipliers of the fold are secret ([`Multipliers`]), so that an attacker cannot choose such
//! addresses.

use core::mem::size_of;

use super::{Address, Address4, Address6, Flow, Multipliers, Ports, Tuple};

/// The key of the flow tables, made of a packet's [`Tuple`]; for IPv4 it is that tuple as it lies
/// in memory.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct FlowKey<A: Address> {
    pub addresses: A::Folded,
    pub ports: Ports,
    /// The IP protocol number.
    pub protocol: u32,
}

impl<A: Address> FlowKey<A> {
    /// Whether a tuple is its own key, byte by byte.
    pub const IS_TUPLE: bool = size_of::<A::Kept>() == 0;

    #[inline(always)]
    #[must_use]
    pub fn folded(tuple: &Tuple<A>, by: Multipliers) -> Self {
        Self {
            addresses: A::fold(tuple.source, tuple.destination, by),
            ports: tuple.ports,
            protocol: tuple.protocol,
        }
    }

    /// The tuple of the packets that the entry under this key matches.
    #[inline(always)]
    #[must_use]
    pub fn unfolded(&self, entry: &Flow<A>, by: Multipliers) -> Tuple<A> {
        let (source, destination) = A::unfold(self.addresses, entry.kept, by);
        Tuple { source, destination, ports: self.ports, protocol: self.protocol }
    }

    /// The key of the `number`th milestone, an entry of kind 0 that no packet matches. Sweeps stop
    /// at each, also in a table that is nearly empty.
    #[must_use]
    pub fn milestone(number: u16) -> Self {
        Self { addresses: A::Folded::default(), ports: Ports::from_host(0, number), protocol: 0 }
    }

    /// Whether it is the key of a [milestone][Self::milestone]: packets of protocol 0 have no flow.
    #[inline(always)]
    #[must_use]
    pub const fn is_milestone(&self) -> bool {
        self.protocol == 0
    }

    /// Folds as [`Self::folded`] does, for tables of programs that were loaded without a seed.
    #[must_use]
    pub fn of(tuple: &Tuple<A>) -> Self {
        Self::folded(tuple, Multipliers::UNSEEDED)
    }

    /// Unfolds as [`Self::unfolded`] does, for such tables.
    #[must_use]
    pub fn tuple(&self, entry: &Flow<A>) -> Tuple<A> {
        self.unfolded(entry, Multipliers::UNSEEDED)
    }
}

impl<A: Address> Flow<A> {
    /// This entry as the one for packets with this tuple.
    #[must_use]
    pub fn keeping(self, tuple: &Tuple<A>) -> Self {
        Self { kept: tuple.destination.kept(), ..self }
    }

    /// Whether an entry that was found by the key of this tuple belongs to the tuple.
    #[inline(always)]
    pub fn is_of(&self, tuple: &Tuple<A>) -> bool {
        self.kept == tuple.destination.kept()
    }
}

const _: () = {
    assert!(FlowKey::<Address4>::IS_TUPLE && !FlowKey::<Address6>::IS_TUPLE);
    assert!(size_of::<FlowKey<Address4>>() == size_of::<Tuple<Address4>>());
    assert!(size_of::<FlowKey<Address6>>() == 24);
};

#[cfg(test)]
mod tests {
    use std::{collections::HashMap, mem::offset_of};

    use super::*;
    use crate::abi::{Address4, Address6, Fold};

    /// Splitmix64.
    fn random(state: &mut u64) -> u64 {
        *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (*state ^ (*state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn there_and_back<A: Address + core::fmt::Debug>(tuple: Tuple<A>) {
        let (key, entry) = (FlowKey::of(&tuple), Flow::default().keeping(&tuple));
        assert_eq!(key.tuple(&entry), tuple);
        assert!(entry.is_of(&tuple));
    }

    #[test]
    fn random_tuples_there_and_back() {
        let mut state = 1;
        for _ in 0..10_000 {
            let mut next = || random(&mut state);
            there_and_back(Tuple {
                source: Address6::from_wire([next(), next()]),
                destination: Address6::from_wire([next(), next()]),
                ports: Ports::from_wire(next() as u32),
                protocol: 6,
            });
            there_and_back(Tuple {
                source: Address4::from_wire(next() as u32),
                destination: Address4::from_wire(next() as u32),
                ports: Ports::from_wire(next() as u32),
                protocol: 17,
            });
        }
    }

    /// Similar addresses of a few networks, paired with each other: no two pairs share a key,
    /// because none was constructed to.
    #[test]
    fn addresses_that_are_much_alike_have_keys_of_their_own() {
        let networks = [0, 1, 0x2001_0db8_0000_0000, 0x2001_0db8_0000_0001, 0xfd00_0000_0000_0000, u64::MAX];
        let hosts = [0, 1, 2, 3, 0xffff, 0x1_0000, 0x0200_00ff_fe00_0001, u64::MAX - 1, u64::MAX];
        let addresses: Vec<Address6> = networks
            .iter()
            .flat_map(|network: &u64| {
                hosts.map(|host: u64| Address6::from_wire([network.to_be(), host.to_be()]))
            })
            .collect();
        let mut keys = HashMap::new();
        for &source in &addresses {
            for &destination in &addresses {
                let tuple = Tuple { source, destination, ports: Ports::from_wire(0x5000_0050), protocol: 6 };
                there_and_back(tuple);
                assert_eq!(keys.insert(FlowKey::of(&tuple), tuple), None, "{tuple:x?}");
            }
        }
        assert_eq!(keys.len(), (networks.len() * hosts.len()).pow(2));
    }

    #[test]
    fn what_shares_a_key_is_told_apart() {
        let mut state = 2;
        for _ in 0..1_000 {
            let mut next = || random(&mut state);
            let one = Tuple {
                source: Address6::from_wire([next(), next()]),
                destination: Address6::from_wire([next(), next()]),
                ports: Ports::from_wire(7),
                protocol: 17,
            };
            let destination = [one.destination.wire()[0], next()];
            let (source, destination) =
                Address6::unfold(FlowKey::of(&one).addresses, destination, Multipliers::UNSEEDED);
            let other = Tuple { source, destination, ..one };
            assert_eq!(FlowKey::of(&one), FlowKey::of(&other));
            let entry = Flow::default().keeping(&one);
            assert!(entry.is_of(&one) && !entry.is_of(&other));
        }
    }

    /// Destinations that share a key under one seed, each with a suitable source, do not under
    /// another.
    #[test]
    fn each_seed_folds_in_its_own_way() {
        let mut state = 3;
        for seed in 0..1_000 {
            let by = [seed, seed + 1].map(Multipliers::of);
            assert!(by.iter().flat_map(|by| by.0).all(|number| number & 1 == 1), "{by:x?}");
            assert!((0..2).all(|half| by[0].0[half] != by[1].0[half]), "{by:x?}");
            assert_ne!(by[0].0[0], by[0].0[1]);
            let mut next = || random(&mut state);
            let one = Tuple {
                source: Address6::from_wire([next(), next()]),
                destination: Address6::from_wire([next(), next()]),
                ports: Ports::from_wire(7),
                protocol: 6,
            };
            let [key, elsewhere] = by.map(|by| FlowKey::folded(&one, by));
            let (source, destination) = Address6::unfold(key.addresses, [next(), next()], by[0]);
            let other = Tuple { source, destination, ..one };
            assert_eq!(FlowKey::folded(&other, by[0]), key);
            assert_ne!(FlowKey::folded(&other, by[1]), elsewhere);
            let entry = Flow::default().keeping(&one);
            assert_eq!((key.unfolded(&entry, by[0]), elsewhere.unfolded(&entry, by[1])), (one, one));
        }
    }

    #[test]
    fn an_ipv4_key_lies_as_its_tuple() {
        type Key = FlowKey<Address4>;
        let [source, destination] = [1, 2].map(Address4::from_wire);
        let tuple = Tuple { source, destination, ports: Ports::from_wire(3), protocol: 4 };
        let Key { addresses, ports, protocol } = Key::of(&tuple);
        assert_eq!((addresses, ports, protocol), ([source, destination], tuple.ports, 4));
        assert_eq!(offset_of!(Key, addresses), offset_of!(Tuple<Address4>, source));
        assert_eq!(offset_of!(Tuple<Address4>, destination), 4);
        assert_eq!(offset_of!(Key, ports), offset_of!(Tuple<Address4>, ports));
        assert_eq!(offset_of!(Key, protocol), offset_of!(Tuple<Address4>, protocol));
    }
}
