//! Selection of the rows that are measured.

use std::collections::BTreeSet;

use anyhow::{Result, bail};

/// One word of the command line: `established`, `wire/nftables`, `established/ipv6-udp`.
///
/// Every word of it must be a word of the row's group or name; before a slash, of the group, and
/// behind it, of the name.
struct Filter {
    text: String,
    group: Option<Vec<String>>,
    rest: Vec<String>,
}

impl Filter {
    fn new(text: &str) -> Self {
        let (group, rest) = match text.split_once('/') {
            Some((group, rest)) => (Some(words(group)), words(rest)),
            None => (None, words(text)),
        };
        Self { text: text.to_owned(), group, rest }
    }

    /// Whether one of its words belongs to the group's name.
    fn names(&self, group: &str) -> bool {
        let group = words(group);
        self.group.as_ref().unwrap_or(&self.rest).iter().any(|word| group.contains(word))
    }

    fn matches(&self, group: &str, name: &str) -> bool {
        let (group, name) = (words(group), words(name));
        let has = |wanted: &[String], found: &[String]| wanted.iter().all(|word| found.contains(word));
        match &self.group {
            Some(wanted) => has(wanted, &group) && has(&self.rest, &name),
            None => has(&self.rest, &[group, name].concat()),
        }
    }
}

/// Returns words in lower case; any character that is neither letter nor digit separates them.
fn words(text: &str) -> Vec<String> {
    let words = text.split(|c: char| !c.is_alphanumeric()).filter(|word| !word.is_empty());
    words.map(str::to_lowercase).collect()
}

/// Group and name of a row.
pub(crate) type Place = (String, String);

/// Rows that were requested, and rows that exist.
#[derive(Default)]
pub(crate) struct Selection {
    filters: Vec<Filter>,
    /// Rows that exist, in the order of the first offer.
    offered: Vec<Place>,
    known: BTreeSet<Place>,
    /// Groups of these that are measured only where they are named.
    by_name: BTreeSet<String>,
    /// Whether only offers are collected and nothing is measured.
    listing: bool,
}

impl Selection {
    /// Makes a selection that wants nothing, and records the offered rows.
    pub(crate) fn listing() -> Self {
        Self { listing: true, ..Self::default() }
    }

    /// Returns the rows of `offered` that these words of the command line select; without any
    /// words, all.
    pub(crate) fn of(filters: &[String], offered: &Self) -> Result<Self> {
        let filters: Vec<_> = filters.iter().map(|text| Filter::new(text)).collect();
        for filter in &filters {
            if !offered.offered.iter().any(|(group, name)| filter.matches(group, name)) {
                bail!(
                    "nothing is called {:?}: these are the groups, `--list` names their rows (with --full, all of them)\n{}",
                    filter.text,
                    offered.groups().join("\n")
                );
            }
        }
        // A part that stops early does not query all of its rows.
        let (by_name, known) = (offered.by_name.clone(), offered.known.clone());
        Ok(Self { filters, offered: offered.offered.clone(), known, by_name, listing: false })
    }

    /// Whether a row is to be measured. It is called for every row that could be, before anything
    /// is set up for it.
    pub(crate) fn wants(&mut self, group: &str, name: &str) -> bool {
        let place = (group.to_owned(), name.to_owned());
        if self.known.insert(place.clone()) {
            self.offered.push(place);
        }
        !self.listing && self.is_wanted(group, name)
    }

    /// Does the same as [`Self::wants`] for a row of a group that is measured only where a word of
    /// the command line belongs to its name.
    pub(crate) fn wants_by_name(&mut self, group: &str, name: &str) -> bool {
        self.by_name.insert(group.to_owned());
        self.wants(group, name)
    }

    fn is_wanted(&self, group: &str, name: &str) -> bool {
        let by_name = self.by_name.contains(group);
        self.filters.is_empty() && !by_name
            || self
                .filters
                .iter()
                .any(|filter| filter.matches(group, name) && (!by_name || filter.names(group)))
    }

    /// Returns the rows that are wanted and exist.
    pub(crate) fn wanted(&self) -> impl Iterator<Item = &Place> {
        self.offered.iter().filter(|(group, name)| self.is_wanted(group, name))
    }

    pub(crate) fn offered(&self) -> &[Place] {
        &self.offered
    }

    fn groups(&self) -> Vec<&str> {
        let mut groups: Vec<&str> = Vec::new();
        for (group, _) in &self.offered {
            if !groups.contains(&group.as_str()) {
                groups.push(group);
            }
        }
        groups
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offers(selection: &mut Selection) -> Vec<bool> {
        [
            ("established", "request, IPv4 TCP, XDP, 1k flows"),
            ("established", "request, IPv4 TCP, TC, 64k flows"),
            ("wire, established", "nftables, 1k Services"),
        ]
        .map(|(group, name)| selection.wants(group, name))
        .to_vec()
    }

    #[test]
    fn filters_mean_words() {
        let mut all = Selection::listing();
        assert_eq!(offers(&mut all), [false; 3]);
        let chosen = |texts: &[&str]| {
            let texts: Vec<_> = texts.iter().map(|text| (*text).to_owned()).collect();
            offers(&mut Selection::of(&texts, &all).unwrap())
        };
        assert_eq!(chosen(&[]), [true; 3]);
        assert_eq!(chosen(&["established"]), [true; 3]);
        assert_eq!(chosen(&["established/request"]), [true, true, false]);
        assert_eq!(chosen(&["TC"]), [false, true, false]);
        assert_eq!(chosen(&["tcp-1k"]), [true, false, false]);
        assert_eq!(chosen(&["wire/nftables", "64k"]), [false, true, true]);
    }

    #[test]
    fn long_groups_are_named() {
        let mut all = Selection::listing();
        let place = ("one-shot questions", "traffic-policy, XDP, 1k Services: sent");
        all.wants_by_name(place.0, place.1);
        for (filters, wanted) in
            [(&[][..], false), (&["xdp"], false), (&["one-shot"], true), (&["questions/xdp"], true)]
        {
            let filters: Vec<_> = filters.iter().map(|text| (*text).to_owned()).collect();
            let mut selection = Selection::of(&filters, &all).unwrap();
            assert_eq!(selection.wants_by_name(place.0, place.1), wanted, "{filters:?}");
            assert_eq!(selection.wanted().count(), usize::from(wanted), "{filters:?}");
        }
    }

    #[test]
    fn a_filter_that_means_nothing_is_an_error() {
        let mut all = Selection::listing();
        offers(&mut all);
        let error = Selection::of(&["established".into(), "nft".into()], &all).err().unwrap().to_string();
        assert!(error.contains("\"nft\"") && error.ends_with("established\nwire, established"), "{error}");
    }
}
