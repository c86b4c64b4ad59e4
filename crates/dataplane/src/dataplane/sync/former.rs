//! Former owners of the slots of Maglev tables, for connections that outlive the node in front of
//! them: when a router moves one to another node while the table changes, its endpoint is the one
//! that the table named before.
//!
//! Each change of a table writes its history anew, in up to [`FORMER`] tables beside it: of each
//! slot the owner before the present one, the one before that, and so on, none of them twice. They
//! give places in a list of their own, since the endpoints may be in no other list any more. The
//! frontend turns to all of it in one write. The history of tables that do not change any more is
//! forgotten after [`LASTS`]; until then a later agent finds it in the maps.

use std::{
    collections::{HashMap, hash_map::Entry},
    net::SocketAddr,
    time::Duration,
};

use traffic_policy_cluster::model::Endpoint;
use traffic_policy_ebpf::abi::{
    Frontend, IndexRange,
    maglev::{self, FORMER, NOBODY},
};

/// The time for which former owners are asked after the last change of a table: that of Beamer
/// (Olteanu et al., NSDI 2018, section 4.3).
pub const LASTS: Duration = Duration::from_secs(240);

/// The former owners in the maps; the default is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Former {
    /// The first element, and the number of tables.
    pub tables: IndexRange,
    /// The slots of each table.
    pub slots: u32,
    /// The endpoints in which the tables give places.
    pub list: IndexRange,
    /// The time in CLOCK_MONOTONIC nanoseconds until which they are asked.
    pub until: u64,
}

impl Former {
    /// Returns the former owners that a frontend names.
    pub fn of(frontend: &Frontend) -> Self {
        let slots = if frontend.former.len > 0 { frontend.maglev.len } else { 0 };
        Self { tables: frontend.former, slots, list: frontend.former_list, until: frontend.former_until }
    }

    /// Returns the range of each table, as [`IndexRange`]s of slots.
    pub fn each_table(&self) -> impl Iterator<Item = IndexRange> {
        let Self { tables, slots, .. } = *self;
        (0..tables.len)
            .map(move |nth| IndexRange { base: tables.base + nth * maglev::elements(slots), len: slots })
    }

    /// Whether they are to be asked at a time of CLOCK_MONOTONIC, in nanoseconds.
    pub fn is_valid(&self, monotonic: u64) -> bool {
        self.tables.len > 0 && self.until > monotonic
    }
}

/// A table: the place in a list of endpoints for each slot.
#[derive(Clone, Copy, Debug)]
pub struct Owners<'a> {
    pub endpoints: &'a [Endpoint],
    pub places: &'a [u16],
}

/// The history of a table: the last owner of each slot before the present one, and so on.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct History {
    pub endpoints: Vec<Endpoint>,
    pub tables: Vec<Vec<u16>>,
}

impl History {
    /// Returns the history after a change of a table, and of its own endpoints: `before` it, and
    /// `after` it. `former`: the history until then.
    pub fn after(
        before: Owners<'_>,
        after: Owners<'_>,
        former_endpoints: &[Endpoint],
        former: &[Vec<u16>],
    ) -> Self {
        let mut known = Known::default();
        // What is known of an endpoint now comes first.
        let now = known.numbers(after.endpoints);
        let last = known.numbers(before.endpoints);
        let earlier = known.numbers(former_endpoints);
        let number = |numbers: &[u16], place: u16| *numbers.get(usize::from(place)).unwrap_or(&NOBODY);
        let mut tables = vec![vec![NOBODY; after.places.len()]; FORMER as usize];
        let mut longest = 0;
        for (slot, (is, was)) in after.places.iter().zip(before.places).enumerate() {
            let is = number(&now, *is);
            let mut owners = [NOBODY; FORMER as usize + 1];
            owners[0] = number(&last, *was);
            for (owner, table) in owners[1..].iter_mut().zip(former) {
                *owner = table.get(slot).map_or(NOBODY, |place| number(&earlier, *place));
            }
            // Without branches: which owners are known already differs from slot to slot.
            let mut kept = [NOBODY; FORMER as usize + 2];
            let mut count = 0;
            for owner in owners {
                let is_known = owner == is || owner == NOBODY || kept.contains(&owner);
                kept[count] = owner;
                count += usize::from(!is_known);
            }
            kept[count] = NOBODY;
            for (table, owner) in tables.iter_mut().zip(kept) {
                table[slot] = owner;
            }
            longest = longest.max(count);
        }
        tables.truncate(longest);
        known.keep(tables)
    }
}

/// Endpoints by their number.
#[derive(Default)]
struct Known {
    endpoints: Vec<Endpoint>,
    numbers: HashMap<SocketAddr, u16>,
}

impl Known {
    /// Returns the numbers of endpoints; that of what cannot be numbered any more is [`NOBODY`].
    fn numbers(&mut self, endpoints: &[Endpoint]) -> Vec<u16> {
        let mut number = |endpoint: &Endpoint| match self.numbers.entry(endpoint.address) {
            Entry::Occupied(known) => *known.get(),
            Entry::Vacant(free) => {
                let number = u16::try_from(self.endpoints.len()).unwrap_or(NOBODY);
                if number != NOBODY {
                    self.endpoints.push(*endpoint);
                    free.insert(number);
                }
                number
            }
        };
        endpoints.iter().map(&mut number).collect()
    }

    /// Returns the history of these tables, with a list of those endpoints alone that they name.
    fn keep(&self, mut tables: Vec<Vec<u16>>) -> History {
        let count = self.endpoints.len();
        // The last one is of slots without an owner.
        let mut is_named = vec![false; count + 1];
        for number in tables.iter().flat_map(|table| table.iter()) {
            is_named[usize::from(*number).min(count)] = true;
        }
        let mut endpoints = Vec::new();
        let mut places = vec![NOBODY; count + 1];
        for (number, endpoint) in self.endpoints.iter().enumerate().filter(|(number, _)| is_named[*number]) {
            places[number] = endpoints.len() as u16;
            endpoints.push(*endpoint);
        }
        if endpoints.len() < count {
            for number in tables.iter_mut().flat_map(|table| table.iter_mut()) {
                *number = places[usize::from(*number).min(count)];
            }
        }
        History { endpoints, tables }
    }
}

#[cfg(test)]
mod tests {
    use traffic_policy_cluster::model::Dispatch;

    use super::*;

    /// The tables of a history, by the last byte of addresses; 0: nobody.
    fn written(history: &History) -> Vec<Vec<u8>> {
        let name = |place: &u16| match history.endpoints.get(usize::from(*place)).map(|e| e.address.ip()) {
            Some(std::net::IpAddr::V4(ip)) => ip.octets()[3],
            _ => 0,
        };
        history.tables.iter().map(|table| table.iter().map(name).collect()).collect()
    }

    fn endpoints(names: &[u8]) -> Vec<Endpoint> {
        let endpoint = |name: &u8| Endpoint {
            address: ([10, 0, 0, *name], 80).into(),
            local: false,
            remote: false,
            opens: Some(Dispatch::Ipip),
            held: None,
            node: 0,
            weight: 1,
        };
        names.iter().map(endpoint).collect()
    }

    /// Tables of the endpoints 1 to 9, one after the other; the name of an endpoint for each slot.
    fn history(tables: &[&[u8]]) -> History {
        let mut history = History::default();
        for pair in tables.windows(2) {
            let list = |names: &[u8]| {
                let mut list = names.to_vec();
                list.sort_unstable();
                list.dedup();
                let places = names.iter().map(|name| list.binary_search(name).unwrap() as u16);
                (endpoints(&list), places.collect::<Vec<_>>())
            };
            let [(before, before_places), (after, after_places)] = [list(pair[0]), list(pair[1])];
            history = History::after(
                Owners { endpoints: &before, places: &before_places },
                Owners { endpoints: &after, places: &after_places },
                &history.endpoints,
                &history.tables,
            );
        }
        history
    }

    #[test]
    fn the_owner_before_a_change_is_kept() {
        let history = history(&[&[1, 2, 3, 3], &[1, 2, 2, 1]]);
        assert_eq!(written(&history), [[0, 0, 3, 3]]);
        assert_eq!(history.endpoints, endpoints(&[3]), "no other endpoint takes room");
    }

    #[test]
    fn the_last_comes_first_and_nobody_twice() {
        assert_eq!(written(&history(&[&[1, 1], &[2, 1], &[3, 1]])), [[2, 0], [1, 0]]);
        assert_eq!(written(&history(&[&[1, 1], &[2, 1], &[1, 1]])), [[2, 0]], "1 is the present one");
        assert_eq!(written(&history(&[&[1], &[2], &[1], &[2], &[3]])), [[2], [1]]);
        assert_eq!(written(&history(&[&[1], &[2], &[3], &[4], &[5]])), [[4], [3], [2]], "1 is forgotten");
        assert_eq!(written(&history(&[&[1, 2], &[1, 2]])), Vec::<Vec<u8>>::new());
    }

    #[test]
    fn what_is_known_of_an_endpoint_now_counts() {
        let (old, mut new) = (endpoints(&[1, 2]), endpoints(&[1, 2]));
        new[0].opens = None;
        let history = History::after(
            Owners { endpoints: &old, places: &[0, 0] },
            Owners { endpoints: &new, places: &[1, 1] },
            &[],
            &[],
        );
        assert_eq!(history.endpoints, new[..1]);
    }
}
