//! Numbers of the nodes that endpoints are on, by which the packet path knows them.

use std::collections::{BTreeMap, BTreeSet};

/// The largest number: the packet path keeps an element for each.
pub const LAST: u16 = 16_383;

/// Numbers from 1, each given to one node while endpoints name it. A number is used again only when
/// all are given.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeNumbers {
    numbers: BTreeMap<Box<str>, u16>,
    names: BTreeMap<u16, Box<str>>,
    /// Numbers given since they were last taken.
    new: BTreeSet<u16>,
}

impl NodeNumbers {
    /// Keeps the numbers that an earlier agent has given.
    pub fn keep(&mut self, names: impl IntoIterator<Item = (u16, String)>) {
        for (number, name) in names.into_iter().filter(|(number, _)| (1..=LAST).contains(number)) {
            self.give(number, name.into());
        }
        self.new.clear();
    }

    /// Returns the number of a node; 0 if it has none.
    #[must_use]
    pub fn get(&self, name: &str) -> u16 {
        self.numbers.get(name).copied().unwrap_or(0)
    }

    /// Returns the name of the node with this number.
    #[must_use]
    pub fn name(&self, number: u16) -> Option<&str> {
        self.names.get(&number).map(AsRef::as_ref)
    }

    /// Gives a node a number, unless it has one. If all are given, those of nodes that are not in
    /// `used` become free; if none is, the node gets none.
    pub(super) fn assign<'a>(&mut self, name: &str, used: impl FnOnce() -> BTreeSet<&'a str>) {
        if self.numbers.contains_key(name) {
            return;
        }
        let next = self.names.last_key_value().map_or(1, |(last, _)| last + 1);
        if next <= LAST {
            return self.give(next, name.into());
        }
        if self.names.len() == usize::from(LAST) {
            let used = used();
            self.numbers.retain(|name, _| used.contains(&**name));
            let numbers = &self.numbers;
            self.names.retain(|_, name| numbers.contains_key(name));
        }
        let free = (1..=LAST).find(|number| !self.names.contains_key(number));
        if let Some(free) = free {
            self.give(free, name.into());
        }
    }

    fn give(&mut self, number: u16, name: Box<str>) {
        self.numbers.insert(name.clone(), number);
        self.names.insert(number, name);
        self.new.insert(number);
    }

    /// Returns the numbers given since the last call, with the names.
    pub fn take_new(&mut self) -> Vec<(u16, String)> {
        let new = std::mem::take(&mut self.new);
        new.into_iter().filter_map(|number| Some((number, self.name(number)?.to_owned()))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_keeps_its_number() {
        let mut numbers = NodeNumbers::default();
        numbers.keep([(7, "old".to_owned()), (0, "none".to_owned())]);
        assert_eq!((numbers.get("old"), numbers.get("none")), (7, 0));
        assert!(numbers.take_new().is_empty(), "the maps have it");
        numbers.assign("new", || unreachable!("there is room"));
        numbers.assign("old", || unreachable!("it has one"));
        assert_eq!((numbers.get("new"), numbers.get("old"), numbers.name(8)), (8, 7, Some("new")));
        assert_eq!(numbers.take_new(), [(8, "new".to_owned())]);
        assert!(numbers.take_new().is_empty());
    }

    #[test]
    fn when_all_are_given_those_of_nodes_without_endpoints_are_used_again() {
        let mut numbers = NodeNumbers::default();
        let names: Vec<String> = (1..=LAST).map(|number| format!("node-{number}")).collect();
        for name in &names {
            numbers.assign(name, BTreeSet::new);
        }
        let all = || names.iter().map(String::as_str).collect();
        numbers.assign("one-more", all);
        assert_eq!(numbers.get("one-more"), 0, "every number is used");
        let but_two = || names.iter().map(String::as_str).filter(|name| !name.ends_with("-3000")).collect();
        numbers.assign("one-more", but_two);
        assert_eq!((numbers.get("one-more"), numbers.get("node-3000")), (3000, 0));
        assert_eq!(numbers.name(3000), Some("one-more"));
    }
}
